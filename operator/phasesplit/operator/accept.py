"""Which spec of an object is reconciled: the current one if it is valid, else the last accepted one.

The last accepted spec lives in a ControllerRevision, so that scaling, fallback and undo go on with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phasesplit.api.conditions import Reason
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.api.validation import InvalidSpec, parse_spec
from phasesplit.cluster.snapshot import Child, ModelView
from phasesplit.operator.conditions import Acceptance
from phasesplit.resources.children import read_accepted_spec

_MAX_MESSAGE = 1500


@dataclass(frozen=True)
class Chosen:
    """The spec to be reconciled (None: there never was a valid one) and the verdict on the current one."""

    spec: DisaggregatedModelSpec | None
    acceptance: Acceptance

    @property
    def is_current(self) -> bool:
        """Is it the user's current spec?"""
        return self.acceptance.accepted


def choose_spec(model: ModelView, revisions: Sequence[Child]) -> Chosen:
    """The current spec, or why not and what instead."""
    try:
        spec = parse_spec(model.name, model.spec)
    except InvalidSpec as error:
        return refuse(str(error), Reason.INVALID, last_accepted(revisions))
    return Chosen(spec, Acceptance(accepted=True))


def refuse(message: str, reason: Reason, older: DisaggregatedModelSpec | None) -> Chosen:
    """The current spec is not acted on."""
    acceptance = Acceptance(
        accepted=False, reason=reason, message=message[:_MAX_MESSAGE], serving_older=older is not None
    )
    return Chosen(older, acceptance)


def last_accepted(revisions: Sequence[Child]) -> DisaggregatedModelSpec | None:
    """The newest accepted spec that this operator still understands."""
    for child in sorted(revisions, key=lambda child: int(child.body.get("revision", 0)), reverse=True):
        try:
            return read_accepted_spec(child.body)
        except (ValueError, KeyError, TypeError):
            continue  # written by a version with other fields
    return None

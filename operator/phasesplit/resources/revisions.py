"""The ControllerRevision that remembers the last accepted spec.

Its data is immutable in Kubernetes, so a new spec is a new object, named by its content.
"""

from phasesplit.api.names import Component
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.hashes import hash_value
from phasesplit.resources.labels import build_metadata


def build_accepted_revision(context: BuildContext) -> Manifest:
    """ControllerRevision with the accepted spec; the caller deletes older ones."""
    spec = context.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": build_metadata(context, f"{context.name}-{hash_value(spec)}", Component.OPERATOR),
        "revision": max(1, context.generation),
        "data": {"spec": spec},
    }


def read_accepted_spec(revision: Manifest) -> DisaggregatedModelSpec:
    """The spec in a ControllerRevision made by `build_accepted_revision`."""
    return DisaggregatedModelSpec.model_validate(revision["data"]["spec"])

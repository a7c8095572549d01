"""All children of one object, in the order in which they are applied.

Replicas of the two StatefulSets are not here: they belong to the second field manager, see
`build_scale`. The transfer Secret is not here either: its values are random and made once.
"""

from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext

__all__ = [
    "build_accepted_revision",
    "build_children",
    "build_scale",
    "build_transfer_secret",
    "keep_template",
    "template_hash",
]


def build_children(context: BuildContext, routing_table: RoutingTable) -> list[Manifest]:
    """Everything the operator applies as `phasesplit`, except the Secret and the revision."""
    raise NotImplementedError


def build_scale(context: BuildContext, pool: Pool, replicas: int) -> Manifest:
    """The least StatefulSet that says only how many; applied as `phasesplit-scaler`."""
    raise NotImplementedError


def build_transfer_secret(context: BuildContext, transfer_key: str, admin_token: str) -> Manifest:
    """Keys shared by router and workers; created once by the operator, never changed."""
    raise NotImplementedError


def build_accepted_revision(context: BuildContext) -> Manifest:
    """ControllerRevision with the accepted spec; `revision` is the generation, data is immutable."""
    raise NotImplementedError


def template_hash(context: BuildContext, pool: Pool) -> str:
    """Hash of what the user's spec says about this pool's pods and needs a restart to act.

    Equal to the annotation `phasesplit.dev/template-hash` on the pods of the current revision.
    """
    raise NotImplementedError


def keep_template(desired: Manifest, owned: Manifest | None) -> Manifest:
    """`desired`, with the pod template that is already applied when the user's spec has not changed it.

    `owned` is the part of the live StatefulSet or Deployment that our field manager owns. With it an
    upgraded operator changes no template, hence restarts no pod, until the user's next change.
    Scheduling gates always follow `desired`. Other kinds come back as they are.
    """
    raise NotImplementedError

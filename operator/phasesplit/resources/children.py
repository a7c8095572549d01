"""All children of one object, in the order in which they are applied.

Replicas of the two StatefulSets are not here: they belong to the second field manager, see
`build_scale`. The transfer Secret is not here either: its values are random and made once.
"""

from copy import deepcopy

from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.accounts import build_router_account, build_router_binding, build_worker_account
from phasesplit.resources.context import BuildContext
from phasesplit.resources.disruption import build_router_budget, build_worker_budget
from phasesplit.resources.hashes import ANNOTATION_SPEC_HASH, template_hash
from phasesplit.resources.network import build_router_policy, build_worker_policy
from phasesplit.resources.revisions import build_accepted_revision, read_accepted_spec
from phasesplit.resources.router import build_router_deployment
from phasesplit.resources.routing_config import build_routing_config
from phasesplit.resources.secrets import build_transfer_secret
from phasesplit.resources.services import build_pool_service, build_router_service
from phasesplit.resources.statefulsets import build_scale, build_statefulset

__all__ = [
    "build_accepted_revision",
    "build_children",
    "build_scale",
    "build_transfer_secret",
    "keep_template",
    "read_accepted_spec",
    "template_hash",
]


def build_children(context: BuildContext, routing_table: RoutingTable) -> list[Manifest]:
    """Everything the operator applies as `phasesplit`, except the Secret and the revision."""
    return [
        build_worker_account(context),
        build_router_account(context),
        build_router_binding(context),
        build_worker_policy(context),
        build_router_policy(context),
        *(build_pool_service(context, pool) for pool in Pool),
        build_router_service(context),
        build_routing_config(context, routing_table),
        *(build_statefulset(context, pool) for pool in Pool),
        build_router_deployment(context),
        build_worker_budget(context),
        build_router_budget(context),
    ]


def keep_template(desired: Manifest, owned: Manifest | None) -> Manifest:
    """`desired`, with the pod template that is already applied when the user's spec has not changed it.

    `owned` is the part of the live StatefulSet or Deployment that our field manager owns. With it an
    upgraded operator changes no template, hence restarts no pod, until the user's next change.
    Scheduling gates always follow `desired`. Other kinds come back as they are.
    """
    template = ((owned or {}).get("spec") or {}).get("template")
    if not template or _spec_hash(desired) is None or _spec_hash(desired) != _spec_hash(owned or {}):
        return desired
    kept = deepcopy(desired)
    kept["spec"]["template"] = deepcopy(template)
    pod = kept["spec"]["template"].setdefault("spec", {})
    pod.pop("schedulingGates", None)
    gates = desired["spec"]["template"]["spec"].get("schedulingGates")
    if gates:
        pod["schedulingGates"] = deepcopy(gates)
    return kept


def _spec_hash(manifest: Manifest) -> str | None:
    annotations = (manifest.get("metadata") or {}).get("annotations") or {}
    return annotations.get(ANNOTATION_SPEC_HASH)

"""Node and pod affinity of workers. Names labels, never lists of nodes."""

from itertools import product

from phasesplit.api import names
from phasesplit.api.names import Component, Pool
from phasesplit.api.quantities import parse_quantity
from phasesplit.api.v1alpha1 import Binding, Manifest, PoolSpec
from phasesplit.resources.context import BuildContext

MEBIBYTE = 1 << 20
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def build_affinity(context: BuildContext, pool: Pool) -> Manifest:
    """The user's affinity, narrowed to fitting GPUs and, with binding Affinity, drawn to the other pool."""
    pool_spec = context.spec.pool(pool)
    affinity = {**pool_spec.affinity}
    terms = _gpu_terms(pool_spec)
    if terms:
        affinity["nodeAffinity"] = _require_terms(affinity.get("nodeAffinity") or {}, terms)
    if context.spec.placement.binding is Binding.AFFINITY:
        affinity["podAffinity"] = _prefer_near(context, pool, affinity.get("podAffinity") or {})
    return affinity


def _gpu_terms(pool_spec: PoolSpec) -> list[list[Manifest]]:
    """Alternatives, each a conjunction of expressions.

    A node without the labels of GPU feature discovery (plain k3s) is let through: there the
    extended resource alone decides.
    """
    gpu = pool_spec.gpu
    wanted: list[Manifest] = []
    if gpu.count == 0:
        return []
    if gpu.products:
        wanted.append({"key": names.GPU_PRODUCT_LABEL, "operator": "In", "values": list(gpu.products)})
    if gpu.min_memory is not None:
        least_mib = int(parse_quantity(gpu.min_memory) / MEBIBYTE)
        wanted.append({"key": names.GPU_MEMORY_LABEL, "operator": "Gt", "values": [str(least_mib - 1)]})
    if not wanted:
        return []
    choices = [[want, {"key": want["key"], "operator": "DoesNotExist"}] for want in wanted]
    return [list(choice) for choice in product(*choices)]


def _require_terms(node_affinity: Manifest, terms: list[list[Manifest]]) -> Manifest:
    """Terms are alternatives, so ours go into each of the user's."""
    required = node_affinity.get(REQUIRED) or {}
    users = required.get("nodeSelectorTerms") or [{}]
    combined = [
        {**user, "matchExpressions": [*(user.get("matchExpressions") or []), *ours]}
        for user in users
        for ours in terms
    ]
    return {**node_affinity, REQUIRED: {**required, "nodeSelectorTerms": combined}}


def _prefer_near(context: BuildContext, pool: Pool, pod_affinity: Manifest) -> Manifest:
    other = Pool.DECODE if pool is Pool.PREFILL else Pool.PREFILL
    levels = context.spec.placement.levels
    near = [
        {
            "weight": max(1, 100 - 100 * index // len(levels)),
            "podAffinityTerm": {
                "topologyKey": level.node_label,
                "labelSelector": {
                    "matchLabels": names.selector_labels(context.name, Component.WORKER, other)
                },
            },
        }
        for index, level in enumerate(levels)
    ]
    if not near:
        return pod_affinity
    return {**pod_affinity, PREFERRED: [*(pod_affinity.get(PREFERRED) or []), *near]}

"""PodDisruptionBudgets: a drained node takes one worker and one router at a time."""

from phasesplit.api import names
from phasesplit.api.names import Component
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.labels import build_metadata


def build_worker_budget(context: BuildContext) -> Manifest:
    """One budget over both pools: while one side is away the other serves colocated."""
    return _build_budget(context, names.worker_account_name(context.name), Component.WORKER)


def build_router_budget(context: BuildContext) -> Manifest:
    """Routers keep no state; one may always go."""
    return _build_budget(context, names.router_name(context.name), Component.ROUTER)


def _build_budget(context: BuildContext, name: str, component: Component) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": build_metadata(context, name, component),
        "spec": {
            "maxUnavailable": 1,
            # A pod that does not serve must not keep its node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.selector_labels(context.name, component)},
        },
    }

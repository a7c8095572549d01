"""NetworkPolicies: who may open a connection to workers and routers. Egress stays open.

Kubelet probes come from the node and are not subject to policies.
"""

from phasesplit.api import names
from phasesplit.api.names import Component
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.labels import build_metadata

# The label that charts of Prometheus put on its pods, ours included.
PROMETHEUS_LABELS = {names.LABEL_NAME: "prometheus"}


def build_worker_policy(context: BuildContext) -> Manifest:
    """KV only between the object's own workers; the API only for router, operator and Prometheus."""
    workers = names.selector_labels(context.name, Component.WORKER)
    routers = names.selector_labels(context.name, Component.ROUTER)
    operators = {names.LABEL_PART_OF: names.PART_OF, names.LABEL_COMPONENT: str(Component.OPERATOR)}
    anywhere: Manifest = {}
    return _build_policy(
        context,
        names.worker_account_name(context.name),
        Component.WORKER,
        [
            {
                "from": [{"podSelector": {"matchLabels": workers}}],
                "ports": [_port(names.WORKER_TRANSFER_PORT)],
            },
            {
                "from": [
                    {"podSelector": {"matchLabels": routers}},
                    {"namespaceSelector": anywhere, "podSelector": {"matchLabels": operators}},
                    {"namespaceSelector": anywhere, "podSelector": {"matchLabels": PROMETHEUS_LABELS}},
                ],
                "ports": [_port(names.WORKER_API_PORT)],
            },
        ],
    )


def build_router_policy(context: BuildContext) -> Manifest:
    """Clients may come from anywhere, and so may a Prometheus."""
    return _build_policy(
        context,
        names.router_name(context.name),
        Component.ROUTER,
        [{"ports": [_port(names.ROUTER_API_PORT)]}],
    )


def _build_policy(
    context: BuildContext, name: str, component: Component, ingress: list[Manifest]
) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": build_metadata(context, name, component),
        "spec": {
            "podSelector": {"matchLabels": names.selector_labels(context.name, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}

"""ServiceAccounts, and the router's RoleBinding to the ClusterRole that the chart ships.

Binding a shipped role needs only the right to bind that one role; the operator can grant nothing else.
"""

from phasesplit.api import names
from phasesplit.api.names import Component
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.labels import build_metadata


def build_worker_account(context: BuildContext) -> Manifest:
    """Account of the workers: no rights, no token in the pod."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": build_metadata(context, names.worker_account_name(context.name), Component.WORKER),
        "automountServiceAccountToken": False,
    }


def build_router_account(context: BuildContext) -> Manifest:
    """Account of the routers."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": build_metadata(context, names.router_name(context.name), Component.ROUTER),
    }


def build_router_binding(context: BuildContext) -> Manifest:
    """Lets routers read ConfigMaps and EndpointSlices of their own namespace."""
    name = names.router_name(context.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": build_metadata(context, name, Component.ROUTER),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": context.settings.router_cluster_role,
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": context.namespace}],
    }

"""Services: headless ones for the pools, the router's for clients."""

from phasesplit.api import names
from phasesplit.api.names import Component, Pool
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.labels import build_metadata


def build_pool_service(context: BuildContext, pool: Pool) -> Manifest:
    """Headless Service whose EndpointSlices tell routers which workers exist, ready or not."""
    name = names.pool_name(context.name, pool)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(context, name, Component.WORKER, pool),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector_labels(context.name, Component.WORKER, pool),
            "ports": [
                {"name": "http", "port": names.WORKER_API_PORT, "targetPort": "http", "protocol": "TCP"},
                {
                    "name": "transfer",
                    "port": names.WORKER_TRANSFER_PORT,
                    "targetPort": "transfer",
                    "protocol": "TCP",
                },
            ],
        },
    }


def build_router_service(context: BuildContext) -> Manifest:
    """The Service that clients use."""
    service = context.spec.router.service
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(context, names.router_name(context.name), Component.ROUTER),
        "spec": {
            "type": str(service.type),
            "selector": names.selector_labels(context.name, Component.ROUTER),
            "ports": [{"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}],
        },
    }

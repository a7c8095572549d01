"""The ConfigMap that carries the routing table to the routers."""

from phasesplit.api import names
from phasesplit.api.names import Component
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.labels import build_metadata


def build_routing_config(context: BuildContext, table: RoutingTable) -> Manifest:
    """The table as one JSON document."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(context, names.routing_name(context.name), Component.ROUTER),
        "data": {names.ROUTING_KEY: table.model_dump_json()},
    }

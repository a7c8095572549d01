"""What discovery publishes: the routing table and the workers' addresses, as immutable values.

Knows how EndpointSlices read; does not watch anything itself.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable

_API_PORT_NAMES = ("api", "http")
_TRANSFER_PORT_NAMES = ("transfer", "kv")


@dataclass(frozen=True, slots=True)
class Address:
    """One worker pod, where it is, and what Kubernetes thinks of it."""

    pod: str
    node: str
    pool: Pool
    host: str
    port: int = names.WORKER_API_PORT
    transfer_port: int = names.WORKER_TRANSFER_PORT
    ready: bool = True
    terminating: bool = False

    @property
    def url(self) -> str:
        """Base address of the worker's API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything discovery knows. `table` is None until one was read."""

    table: RoutingTable | None = None
    addresses: tuple[Address, ...] = ()


Publish = Callable[[Snapshot], None]


class Discovery(Protocol):
    """Finds the table and the workers, and says so again whenever they change."""

    def run(self, publish: Publish) -> Awaitable[None]:
        """Publish snapshots until cancelled. Keeps the last one when its source is away."""
        ...


def addresses_of_slices(
    slices: Iterable[Mapping[str, Any]], pools: Mapping[str, Pool]
) -> tuple[Address, ...]:
    """Workers of EndpointSlices (plain objects). `pools` maps Service names to pools.

    A pod may stand in several slices while they are rebalanced; a ready entry wins.
    """
    found: dict[str, Address] = {}
    for item in slices:
        labels = item.get("metadata", {}).get("labels") or {}
        pool = pools.get(labels.get("kubernetes.io/service-name", ""))
        if pool is None:
            continue
        ports = {port.get("name") or "": port.get("port") for port in item.get("ports") or ()}
        for endpoint in item.get("endpoints") or ():
            address = _address(endpoint, pool, ports)
            if address is not None and (address.pod not in found or address.ready):
                found[address.pod] = address
    return tuple(found[pod] for pod in sorted(found))


def _address(endpoint: Mapping[str, Any], pool: Pool, ports: Mapping[str, int | None]) -> Address | None:
    target = endpoint.get("targetRef") or {}
    hosts = endpoint.get("addresses") or ()
    if not hosts or not target.get("name"):
        return None
    conditions = endpoint.get("conditions") or {}
    # "not-ready addresses are published too": a headless Service that publishes them reports
    # ready=True for every pod, so `serving` is the condition that tells.
    ready = conditions.get("serving")
    if ready is None:
        ready = conditions.get("ready")
    return Address(
        pod=target["name"],
        node=endpoint.get("nodeName") or "",
        pool=pool,
        host=hosts[0],
        port=_port(ports, _API_PORT_NAMES, names.WORKER_API_PORT),
        transfer_port=_port(ports, _TRANSFER_PORT_NAMES, names.WORKER_TRANSFER_PORT),
        ready=ready is not False,
        terminating=bool(conditions.get("terminating")),
    )


def _port(ports: Mapping[str, int | None], wanted: tuple[str, ...], default: int) -> int:
    for name in wanted:
        port = ports.get(name)
        if port:
            return port
    return default

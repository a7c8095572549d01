"""Fetches what is new in the traces of an object's routers. I/O only: `traffic` keeps it."""

from collections.abc import Callable

from phasesplit.cluster.router_client import RouterClient
from phasesplit.cluster.snapshot import Snapshot
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.observation import addresses_of
from phasesplit.operator.traffic import READ_EVERY_S

# More rows than these batches hold come with the next look.
_MAX_BATCHES = 4


class TrafficReader:
    """Reads traces with a cursor, so that every row travels once."""

    def __init__(self, routers: RouterClient, clock: Callable[[], float]) -> None:
        self._routers = routers
        self._clock = clock

    async def read(self, snapshot: Snapshot, memory: ObjectMemory, token: str) -> None:
        """Take in what is new of every router that has something, and what is in flight."""
        now_s = self._clock()
        if memory.traffic_read_at_s is not None and now_s - memory.traffic_read_at_s < READ_EVERY_S:
            return
        memory.traffic_read_at_s = now_s
        addresses = addresses_of(snapshot.router_pods())
        memory.traffic.keep_only(addresses.keys(), now_s)
        for answer in memory.answers:
            report = answer.report
            if report is None or answer.pod not in addresses:
                continue
            if report.in_flight or report.traced_total != memory.traffic.cursor(answer.pod).after:
                await self._read_router(answer.pod, addresses[answer.pod], memory, token)
            else:
                memory.traffic.note_quiet(answer.pod, now_s)

    async def _read_router(self, pod: str, ip: str, memory: ObjectMemory, token: str) -> None:
        for _ in range(_MAX_BATCHES):
            batch = await self._routers.read_trace(pod, ip, token, memory.traffic.cursor(pod))
            if batch is None:
                return
            memory.traffic.add(pod, batch, self._clock())
            if batch.next >= batch.total:
                return

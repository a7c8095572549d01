"""Fetches what is new in the traces of an object's routers. I/O only: `traffic` keeps it."""

from collections.abc import Callable

from phasesplit.cluster.router_client import RouterClient
from phasesplit.cluster.snapshot import Snapshot
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.observation import addresses_of

# Between two looks at the traces; a trial counts what it sees, and looks more often.
EVERY_S = 10.0
EVERY_IN_TRIAL_S = 4.0
# More rows than these batches hold come with the next look.
_MAX_BATCHES = 4


class TrafficReader:
    """Reads traces with a cursor, so that every row travels once."""

    def __init__(self, routers: RouterClient, clock: Callable[[], float]) -> None:
        self._routers = routers
        self._clock = clock

    async def read(self, snapshot: Snapshot, memory: ObjectMemory, token: str) -> None:
        """Take in new rows of every router that has some."""
        now_s = self._clock()
        every_s = EVERY_IN_TRIAL_S if memory.in_trial else EVERY_S
        if memory.traffic_read_at_s is not None and now_s - memory.traffic_read_at_s < every_s:
            return
        memory.traffic_read_at_s = now_s
        addresses = addresses_of(snapshot.router_pods())
        memory.traffic.keep_only(addresses.keys())
        for answer in memory.answers:
            if answer.report is None or answer.pod not in addresses:
                continue
            if answer.report.traced_total != memory.traffic.cursor(answer.pod).after:
                await self._read_router(answer.pod, addresses[answer.pod], memory, token)

    async def _read_router(self, pod: str, ip: str, memory: ObjectMemory, token: str) -> None:
        for _ in range(_MAX_BATCHES):
            batch = await self._routers.read_trace(pod, ip, token, memory.traffic.cursor(pod))
            if batch is None:
                return
            memory.traffic.add(pod, batch, self._clock())
            if batch.next >= batch.total:
                return

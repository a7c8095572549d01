"""Reads the routers of an object and has links measured. I/O only: `links` plans, the planner judges."""

import asyncio
import logging
from collections.abc import Callable

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.reports import ProbeRequest
from phasesplit.cluster.router_client import RouterClient
from phasesplit.cluster.snapshot import Key, Snapshot
from phasesplit.cluster.worker_admin import WorkerAdmin
from phasesplit.operator.links import DOUBT_DUTY, Probe, ProbeMemory, plan_probe
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.observation import addresses_of, merge_reports
from phasesplit.planner.facts import WorkerFacts

logger = logging.getLogger(__name__)

_PROBE_DEADLINE_S = 5.0  # a link of 2 Mbit/s still gives a number
# Two passes within this time use the same reports.
_REPORTS_FRESH_S = 1.0


class Prober:
    """One object's routers and links."""

    def __init__(
        self,
        routers: RouterClient,
        workers: WorkerAdmin,
        wake: Callable[[Key], None],
        clock: Callable[[], float],
    ) -> None:
        self._routers = routers
        self._workers = workers
        self._wake = wake
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    async def read_routers(self, snapshot: Snapshot, memory: ObjectMemory, token: str) -> None:
        """Refresh the routers' reports and what follows from them."""
        started_s = self._clock()
        if memory.answered_at_s is not None and started_s - memory.answered_at_s < _REPORTS_FRESH_S:
            return
        addresses = addresses_of(snapshot.router_pods())
        answers = await self._routers.read_all(addresses, token)
        now_s = self._clock()
        for answer in answers:
            if answer.error:
                logger.debug("%s/%s: %s", *snapshot.model.key, answer.error)
        memory.answers = tuple(answers)
        memory.answered_at_s = now_s
        reports, _ = merge_reports(answers)
        memory.transfers.add(reports.values(), now_s)
        for answer in answers:
            if answer.report is not None:
                memory.links.add(answer.report.links, now_s)
                for worker in answer.report.workers:
                    memory.links.add(worker.links, now_s)
        memory.links.forget_old(now_s)

    def probe_stale_links(
        self,
        snapshot: Snapshot,
        memory: ObjectMemory,
        token: str,
        *,
        workers: tuple[WorkerFacts, ...],
        stale_s: float,
    ) -> None:
        """Start the measurement that is most needed, if any, beside the pass."""
        if memory.probing:
            return
        probe = plan_probe(
            memory.links,
            [worker for worker in workers if worker.pool is Pool.DECODE],
            [worker for worker in workers if worker.pool is Pool.PREFILL],
            now_s=self._clock(),
            stale_s=stale_s,
            last=memory.probe,
        )
        addresses = addresses_of(snapshot.worker_pods())
        if probe is None or probe.source not in addresses or probe.puller not in addresses:
            return
        memory.probing = True
        task = asyncio.create_task(self._probe(snapshot.model.key, memory, token, probe, addresses))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(
        self, key: Key, memory: ObjectMemory, token: str, probe: Probe, addresses: dict[str, str]
    ) -> None:
        started_s = self._clock()
        busy_s: float | None = None
        first = memory.links.age_s(probe.pair, started_s) is None
        try:
            request = ProbeRequest(
                host=addresses[probe.source],
                port=names.WORKER_TRANSFER_PORT,
                pod=probe.source,
                node=probe.pair[0],
                bytes=probe.bytes,
                deadline_s=_PROBE_DEADLINE_S,
            )
            result = await self._workers.probe(addresses[probe.puller], token, request)
            if result.sample is not None:
                busy_s = result.sample.busy_s
                memory.links.add([result.sample], self._clock())
            else:
                logger.info("%s/%s: no measurement from %s to %s: %s", *key, *probe.pair, result.error)
        finally:
            ended_s = self._clock()
            took_s = ended_s - started_s
            if busy_s is not None:
                # What the link was busy counts, not the wait for busy processors at its ends.
                took_s = min(busy_s, memory.links.transfer_s(probe.pair, probe.bytes) or busy_s)
            memory.probe = ProbeMemory(ended_s, took_s, failed=busy_s is None)
            memory.probing = False
            # A measurement like the last one is not worth a pass of its own.
            if first or busy_s is None:
                self._wake(key)
            elif memory.links.is_in_doubt(probe.pair):
                # This pass says so, the later one measures again: doubt is not left to the next tick.
                self._wake(key)
                asyncio.get_running_loop().call_later(took_s / DOUBT_DUTY, self._wake, key)

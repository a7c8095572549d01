"""Composition: everything one router process is made of, and the report it gives of itself."""

import asyncio
import random
import time

import aiohttp

from phasesplit.api.reports import RouterReport
from phasesplit.api.routing import LatencyClass, RoutingTable, ServedMode
from phasesplit_http.errors import ApiError
from phasesplit_router import admission
from phasesplit_router.attempt import Services
from phasesplit_router.fleet import Demand
from phasesplit_router.halves import Halves
from phasesplit_router.legs import Leg, Patience
from phasesplit_router.metrics import Metrics
from phasesplit_router.monitor import Monitor
from phasesplit_router.predict import TextLength
from phasesplit_router.quarantine import Quarantine
from phasesplit_router.queues import Queues
from phasesplit_router.records import Ledger, Record
from phasesplit_router.retry import RetryBudget
from phasesplit_router.settings import RouterSettings
from phasesplit_router.snapshot import Snapshot
from phasesplit_router.trace_ring import TraceRing
from phasesplit_router.workers import Worker, WorkerBook, newest_links

_TYPICAL_PROMPT_TOKENS = 256  # where no request of a class was seen yet


class Router:
    """One router. Made on the event loop; `close` ends it."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.book = WorkerBook()
        self.quarantine = Quarantine()
        self.queues = Queues(self.book, self.quarantine, max_queued=settings.max_queued)
        started_s = time.monotonic()
        self.ledger = Ledger(started_s)
        self.trace_ring = TraceRing(started_s)
        self.metrics = Metrics(name=settings.object_name, namespace=settings.namespace)
        self.draw = random.Random()
        self.in_flight = 0
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._legs_session = _session(limit_idle_s=15)
        self._admin_session = _session(limit_idle_s=30)
        self.monitor = Monitor(
            self.book,
            self._admin_session,
            admin_token=settings.admin_token or "",
            patience=Patience(between_tokens_s=settings.stall_s),
            wake=self.queues.wake,
            last_arrival_s=lambda: self.ledger.last_arrival_s,
            in_flight=lambda: self.in_flight,
        )
        self.services = Services(
            book=self.book,
            queues=self.queues,
            quarantine=self.quarantine,
            lengths=TextLength(),
            retries=RetryBudget(),
            halves=Halves(self.draw, lambda: self.book.table),
            observer=self,
            open_leg=self._open_leg,
            cancel=self.monitor.cancel_leg,
            check=self.monitor.check,
            spawn=self.monitor.spawn,
            admin_token=settings.admin_token or "",
            draw=self.draw,
        )

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Discovery found something new."""
        self.monitor.apply(snapshot)
        self.quarantine.keep_only(frozenset(self.book.workers))
        if snapshot.table is not None:
            self.metrics.take_table(snapshot.table)

    def count_in_flight(self, change: int) -> None:
        """A request came or went."""
        self.in_flight += change
        self.metrics.in_flight(change)
        if self.in_flight:
            self.is_idle.clear()
        else:
            self.is_idle.set()

    def admit(self, demand: Demand, latency_class: LatencyClass) -> ApiError | None:
        """The refusal a new request gets, if any."""
        outlook = self.queues.outlook(demand, time.monotonic())
        return admission.refuse(latency_class, outlook)

    def _open_leg(self, worker: Worker, path: str, body: bytes, headers: dict[str, str]) -> Leg:
        return Leg(self._legs_session, worker, path, body, headers)

    # Observer of flows

    def local_prefill(self, reason: str) -> None:
        """A request of a split model is served by one worker."""
        self.ledger.local_prefills[reason] = self.ledger.local_prefills.get(reason, 0) + 1
        self.metrics.local_prefill(reason)

    def migrated(self) -> None:
        """A stream goes on elsewhere."""
        self.metrics.migrated()

    def tokens_sent(self, record: Record, gap_s: float, count: int) -> None:
        """Tokens after the first went out."""
        labels = self.metrics.request_labels(record.latency_class, record.mode)
        self.metrics.itl.observe(labels, gap_s, count)

    # Report

    def report(self) -> RouterReport:
        """`GET /v1/phasesplit/status`."""
        now_s = time.monotonic()
        table = self.book.table or RoutingTable()
        workers = self.book.workers.values()
        return RouterReport(
            namespace=self.settings.namespace,
            name=self.settings.object_name,
            table_version=table.version,
            mode=table.mode if self.book.table else ServedMode.COLOCATED,
            in_flight=self.in_flight,
            queued=len(self.queues),
            idle_s=max(0.0, now_s - self.ledger.last_arrival_s),
            requests_total=self.ledger.requests_total,
            traced_total=self.trace_ring.total,
            failed_total=self.ledger.failed_total,
            migrations_total=self.ledger.migrations_total,
            local_prefills_total=dict(self.ledger.local_prefills),
            workers=[worker.report for worker in workers if worker.report is not None and not worker.is_down],
            unreachable={worker.pod: worker.error for worker in workers if worker.error},
            links=list(newest_links(workers, now_s).values()),
            classes=self.ledger.class_reports(table.classes, self._waits_s(table, now_s), now_s),
            quarantined_pairs=sorted(",".join(pair) for pair in self.quarantine.active(now_s)),
        )

    def _waits_s(self, table: RoutingTable, now_s: float) -> dict[str, float]:
        """Predicted wait of a typical request of each class arriving now."""
        return {
            item.name: self.queues.outlook(
                Demand(
                    request_id="",
                    prompt_tokens=_TYPICAL_PROMPT_TOKENS,
                    output_tokens=self.services.lengths.expected_output_tokens(None),
                    ttft_s=item.ttft_s,
                    tpot_s=item.tpot_s,
                    priority=item.priority,
                ),
                now_s,
            ).wait_s
            for item in table.classes
        }

    async def close(self) -> None:
        """End everything that runs in the background."""
        await self.monitor.close()
        await self._legs_session.close()
        await self._admin_session.close()


def _session(*, limit_idle_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=limit_idle_s),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=3.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )

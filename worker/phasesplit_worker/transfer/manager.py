"""The transfer side of a worker, as engine and server see it.

    manager = TransferManager(settings, key, pool, release=engine.release_held, on_expired=...)
    engine.set_hooks(manager.hooks)
    await manager.start()
    result = await manager.pull(params, token_ids, block_ids, num_cached_tokens=n)

Composition and bookkeeping only; serving and pulling run on threads of their own, so the event loop
never waits for a socket. When `pull` returns, raises or is cancelled, nothing writes to the blocks
any more: a failed pull leaves them to be recomputed.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from phasesplit.api.legs import KVTransferParams
from phasesplit.api.manifest import KVManifest
from phasesplit.api.reports import LinkSample, ProbeRequest, ProbeResult
from phasesplit_worker.requests import KVBlocks, TransferHooks
from phasesplit_worker.transfer.cancellation import Cancellation, settle
from phasesplit_worker.transfer.counts import Tally, TransferCounts
from phasesplit_worker.transfer.deadlines import choose_deadline_s
from phasesplit_worker.transfer.errors import (
    CALLED_OFF,
    RELEASING_FAILURES,
    Measured,
    TransferError,
    TransferFailure,
)
from phasesplit_worker.transfer.export import ExportIdentity
from phasesplit_worker.transfer.housekeeping import Housekeeper
from phasesplit_worker.transfer.integrity import count_blocks
from phasesplit_worker.transfer.links import LinkBook
from phasesplit_worker.transfer.peers import LocalIdentity, PeerBook, Quarantine
from phasesplit_worker.transfer.pull import PullRequest, PullResult, Transport
from phasesplit_worker.transfer.settings import TransferSettings
from phasesplit_worker.transfer.store import KVStore
from phasesplit_worker.transfer.tcp_client import TcpPuller
from phasesplit_worker.transfer.tcp_server import TcpServer, format_endpoint
from phasesplit_worker.transfer.tcp_session import ServerIdentity

__all__ = ["TransferManager", "TransferSettings"]


def _ignore(_: object) -> None:
    return None


class TransferManager:
    """One per worker process. Methods may be called from any thread; coroutines from one loop."""

    def __init__(
        self,
        settings: TransferSettings,
        key: bytes,
        pool: KVBlocks,
        *,
        release: Callable[[str], None],
        on_expired: Callable[[int], None] = _ignore,
        on_refused: Callable[[TransferFailure], None] = _ignore,
    ) -> None:
        """`release(request_id)` frees a held prefill; `on_expired(num_blocks)` is for metrics."""
        self._settings = settings
        self._pool = pool
        self._on_expired = on_expired
        self._tally = Tally()
        self._links = LinkBook()
        self._quarantine = Quarantine()
        self._pulling: dict[str, Cancellation] = {}
        identity = ExportIdentity(
            model_fingerprint=settings.model_fingerprint,
            layout=pool.layout,
            engine_id=settings.engine_id,
            endpoint=lambda: format_endpoint(settings.advertised_host, self.port),
        )
        self._store = KVStore(identity, ttl_s=settings.ttl_s)
        self._housekeeper = Housekeeper(self._store, pool, release=release, on_expired=self._count_expired)
        self._server = TcpServer(
            self._store,
            pool,
            ServerIdentity(
                engine_id=settings.engine_id,
                pod=settings.pod,
                node=settings.node,
                model_fingerprint=settings.model_fingerprint,
            ),
            key,
            host=settings.host,
            port=settings.port,
            limits=settings.server_limits,
            on_refused=on_refused,
        )
        me = LocalIdentity(engine_id=settings.engine_id, pod=settings.pod, node=settings.node)
        self._transport: Transport = TcpPuller(
            PeerBook(me, key),
            pool,
            settings.model_fingerprint,
            max_streams=settings.max_streams,
            max_pulls=settings.max_pulls,
            silence_s=settings.silence_s,
            on_measured=self._record_link,
        )
        self._threads = ThreadPoolExecutor(settings.max_pulls, thread_name_prefix="kv-pull")
        # Releases and probes never wait behind pulls.
        self._errands = ThreadPoolExecutor(4, thread_name_prefix="kv-errand")

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        self._housekeeper.start()
        self._server.start()

    async def stop(self) -> None:
        """Cancel pulls, close everything, give every block back."""
        for cancellation in list(self._pulling.values()):
            cancellation.cancel()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._server.stop()
        self._housekeeper.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._errands.shutdown(wait=True, cancel_futures=True)
        self._transport.close()

    # -- prefill side --------------------------------------------------------------------------

    @property
    def hooks(self) -> TransferHooks:
        """What the engine reports leg 1 to."""
        return self._store

    @property
    def engine_id(self) -> str:
        """Identity of this process."""
        return self._settings.engine_id

    @property
    def port(self) -> int:
        """Port the KV protocol listens on."""
        return self._server.port

    @property
    def num_exports(self) -> int:
        """Prefills whose blocks have not been given back."""
        return self._store.num_exports

    def offer(self, request_id: str, num_tokens: int) -> KVTransferParams:
        """What leg 1 tells the router. From now on a pull waits for the prefill to be accepted."""
        self._store.promise(request_id)
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_id,
            remote_request_id=request_id,
            remote_host=self._settings.advertised_host,
            remote_port=self.port,
            remote_num_tokens=num_tokens,
            remote_pod=self._settings.pod,
        )

    def manifest(self, request_id: str) -> KVManifest | None:
        """The manifest of a prefill here, also for a while after its end."""
        return self._store.manifest(request_id)

    def abort(self, request_id: str) -> None:
        """Nobody wants this request's KV any more: end its export and its pull, if there are any."""
        self._store.release(request_id, pulled=False)
        cancellation = self._pulling.get(request_id)
        if cancellation is not None:
            cancellation.cancel()

    # -- decode side ---------------------------------------------------------------------------

    async def pull(
        self,
        params: KVTransferParams,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        num_cached_tokens: int = 0,
        deadline_s: float | None = None,
        cancellation: Cancellation | None = None,
    ) -> PullResult:
        """Fill `block_ids` with the verified KV of `token_ids`. Raises TransferError.

        `block_ids` is the whole block table of the tokens; its first `num_cached_tokens //
        block_size` blocks hold their KV already and are not written. `deadline_s` bounds the whole,
        waiting for a prefill that still computes included; the transfer itself has the settings'
        deadline, or one from its size and the link. Cancelling the task ends the pull first.
        """
        cancellation = cancellation or Cancellation()
        peer = params.remote_pod or f"{params.remote_host}:{params.remote_port}"
        try:
            request = self._to_request(params, token_ids, block_ids, num_cached_tokens, deadline_s)
            self._quarantine.check(peer, time.monotonic())
            result = await self._run_pull(request, cancellation)
        except TransferError as error:
            self._tally.add_failure(error.reason)
            self._quarantine.failed(peer, error.reason, time.monotonic())
            raise
        self._tally.add_pull(result)
        self._quarantine.succeeded(peer)
        return result

    def _to_request(
        self,
        params: KVTransferParams,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        num_cached_tokens: int,
        deadline_s: float | None,
    ) -> PullRequest:
        if params.remote_host is None or params.remote_port is None or params.remote_request_id is None:
            raise TransferError(
                TransferFailure.PROTOCOL,
                "kv_transfer_params must have remote_host, remote_port and remote_request_id",
            )
        layout = self._pool.layout
        first_block = num_cached_tokens // layout.block_size
        transfer_s = self._settings.transfer_deadline_s
        if transfer_s is None:
            num_blocks = count_blocks(len(token_ids), layout.block_size) - first_block
            samples = [one for one in self.link_samples() if one.from_pod == params.remote_pod]
            transfer_s = choose_deadline_s(num_blocks * layout.bytes_per_block, samples)
        if deadline_s is None:
            deadline_s = self._settings.whole_deadline_s
        return PullRequest(
            request_id=params.remote_request_id,
            host=params.remote_host,
            port=params.remote_port,
            engine_id=params.remote_engine_id,
            token_ids=tuple(token_ids),
            block_ids=tuple(block_ids),
            first_block=first_block,
            transfer_s=transfer_s,
            deadline=time.monotonic() + deadline_s,
        )

    async def _run_pull(self, request: PullRequest, cancellation: Cancellation) -> PullResult:
        self._pulling[request.request_id] = cancellation
        try:
            return await settle(self._submit(request, cancellation), cancellation)
        except TransferError as error:
            if error.reason in RELEASING_FAILURES:
                self._release_later(request)
            raise
        except asyncio.CancelledError:
            self._tally.add_failure(TransferFailure.CANCELLED)
            self._release_later(request)
            raise
        finally:
            self._pulling.pop(request.request_id, None)

    def _submit(self, request: PullRequest, cancellation: Cancellation) -> Future[PullResult]:
        try:
            return self._threads.submit(self._transport.pull, request, cancellation)
        except RuntimeError as error:
            raise TransferError(TransferFailure.CANCELLED, "this worker is stopping") from error

    def _release_later(self, request: PullRequest) -> None:
        with suppress(RuntimeError):  # stopping: the peer's time to live does it
            self._errands.submit(self._transport.release, request)

    # -- links ---------------------------------------------------------------------------------

    async def probe(self, request: ProbeRequest) -> ProbeResult:
        """Measure the link from a peer to this worker."""
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + request.deadline_s
        try:
            measured = await loop.run_in_executor(
                self._errands, self._transport.probe, request.host, request.port, request.bytes, deadline
            )
        except TransferError as error:
            return ProbeResult(error=str(error))
        named = replace(
            measured,
            peer_pod=request.pod or measured.peer_pod,
            peer_node=request.node or measured.peer_node,
        )
        return ProbeResult(sample=self._record_link(named, is_probe=True))

    def link_samples(self) -> list[LinkSample]:
        """Recent measurements of links to this worker."""
        return self._links.samples(time.monotonic())

    def quarantined_peers(self) -> dict[str, float]:
        """Peers that are not pulled from for a while after repeated failures, with the seconds left."""
        return self._quarantine.resting(time.monotonic())

    def _record_link(self, measured: Measured, is_probe: bool = False) -> LinkSample:
        sample = LinkSample(
            from_node=measured.peer_node,
            to_node=self._settings.node,
            from_pod=measured.peer_pod,
            to_pod=self._settings.pod,
            transport=self._transport.name,
            bytes=measured.num_bytes,
            busy_s=measured.busy_s,
            age_s=0.0,
            probe=is_probe,
        )
        self._links.record(sample, time.monotonic())
        return sample

    # -- counts --------------------------------------------------------------------------------

    @property
    def counts(self) -> TransferCounts:
        """All totals."""
        return self._tally.snapshot(self._server.refused)

    @property
    def transfers_total(self) -> int:
        """Pulls that were seen through, well or not: what failures are a share of."""
        return self.counts.pulls + sum(self.failures_total.values())

    @property
    def failures_total(self) -> dict[str, int]:
        """Pulls that failed, by reason; those that somebody called off are no failures."""
        counted = self.counts.failures.items()
        return {reason: count for reason, count in counted if reason not in CALLED_OFF}

    def _count_expired(self, num_blocks: int) -> None:
        self._tally.add_expired(num_blocks)
        self._on_expired(num_blocks)

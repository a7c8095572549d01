"""The decode side of the TCP transport: pulls blocks into reserved memory, on one to four streams.

Streams of one pull are threads that end together: the first failure wakes the others, and `pull`
returns only when none of them can write any more. A broken connection or a bad block is tried once
more, from the first block that is missing. Knows streams and peers; not the engine.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

from phasesplit_worker.requests import KVBlocks
from phasesplit_worker.transfer.cancellation import Cancellation
from phasesplit_worker.transfer.channel import Channel, Limits
from phasesplit_worker.transfer.errors import (
    RETRIED_FAILURES,
    Measured,
    TransferError,
    TransferFailure,
)
from phasesplit_worker.transfer.messages import (
    MAX_SMALL_HEADER_BYTES,
    Final,
    Probe,
    ProbeData,
    Pull,
    Release,
)
from phasesplit_worker.transfer.peers import Connection, PeerBook
from phasesplit_worker.transfer.pull import PullRequest, PullResult, Reception
from phasesplit_worker.transfer.stripes import choose_group_blocks, choose_num_streams
from phasesplit_worker.transfer.tcp_stream import PullStream, StreamLimits

NUM_ATTEMPTS = 2
RELEASE_S = 1.0
# A long pull over a slow link reports what it sees while it runs: each time that this much has come and
# has taken so long.
WINDOW_BYTES = 2 << 20
WINDOW_S = 0.25
_PROBE_BUFFER_BYTES = 1 << 20


class TcpPuller:
    """Implements `Transport`. `pull` blocks its thread; further streams run on an own pool."""

    name = "TCP"

    def __init__(
        self,
        peers: PeerBook,
        pool: KVBlocks,
        model_fingerprint: str,
        *,
        max_streams: int,
        max_pulls: int,
        silence_s: float,
        on_measured: Callable[[Measured], object],
    ) -> None:
        """`on_measured` gets each measurement that a pull makes of its link, on the pull's threads."""
        self._on_measured = on_measured
        self._peers = peers
        self._pool = pool
        self._model_fingerprint = model_fingerprint
        self._max_streams = max_streams
        self._silence_s = silence_s
        # Sized so that no pull ever waits for a thread of another one.
        self._threads = ThreadPoolExecutor(
            max_workers=max(1, max_pulls * (max_streams - 1)), thread_name_prefix="kv-stream"
        )

    def close(self) -> None:
        """End the stream threads; pulls must have ended."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._peers.close()

    def pull(self, request: PullRequest, cancellation: Cancellation) -> PullResult:
        """Fetch, verify and confirm. Raises TransferError when that did not work."""
        reception = Reception(request, self._pool, self._model_fingerprint)
        started_s = time.monotonic()
        spent_s = 0.0
        num_retries = 0
        while True:
            limits = StreamLimits(transfer_s=request.transfer_s - spent_s, silence_s=self._silence_s)
            attempt = _Attempt(reception, cancellation, self._peers, limits, self._on_measured)
            try:
                final = attempt.run(self._threads, self._max_streams)
            except TransferError as error:
                if error.reason is TransferFailure.TIMEOUT:
                    attempt.report_rest()  # a link that is too slow must be seen as such
                spent_s += attempt.busy_s
                is_late = spent_s >= request.transfer_s or time.monotonic() >= request.deadline
                is_last = num_retries == NUM_ATTEMPTS - 1 or is_late or cancellation.is_set()
                if is_last or error.reason not in RETRIED_FAILURES:
                    error.first_token = reception.first_token
                    raise
                self._peers.forget((request.host, request.port))
                num_retries += 1
                continue
            return self._conclude(reception, attempt, final, started_s, num_retries)

    def release(self, request: PullRequest) -> None:
        """Tell the peer, if it can be reached in time, that nobody wants its KV any more."""
        limits = Limits(deadline=time.monotonic() + RELEASE_S, silence_s=RELEASE_S)
        with suppress(TransferError):  # its time to live does the same, only later
            connection = self._connect((request.host, request.port), request.engine_id, limits)
            connection.channel.send(Release(request_id=request.request_id, pulled=False), limits)
            self._peers.give(connection)

    def probe(self, host: str, port: int, num_bytes: int, deadline: float) -> Measured:
        """Fetch `num_bytes` of nothing, timed from asking to the last byte."""
        limits = Limits(deadline=deadline, silence_s=self._silence_s)
        connection = self._connect((host, port), None, limits)
        try:
            busy_s = _probe(connection.channel, num_bytes, limits)
        except BaseException:  # whatever it was: bytes left in the connection belong to nobody
            connection.channel.close()
            raise
        self._peers.give(connection)
        return Measured(connection.pod, connection.node, num_bytes, busy_s)

    def _connect(self, address: tuple[str, int], engine_id: str | None, limits: Limits) -> Connection:
        return self._peers.take(address, engine_id) or self._peers.connect(address, engine_id, limits)

    def _conclude(
        self, reception: Reception, attempt: "_Attempt", final: Final, started_s: float, num_retries: int
    ) -> PullResult:
        """Confirm to the peer, keep the connections, and sum up."""
        now_s = time.monotonic()
        attempt.report_rest()
        attempt.confirm(Limits(deadline=now_s + RELEASE_S, silence_s=RELEASE_S))
        measured = attempt.measured
        transfer_s = now_s - started_s
        return PullResult(
            first_token=reception.check_final(final.manifest),
            sampling_state=dict(final.manifest.sampling_state),
            num_tokens=final.manifest.num_tokens,
            num_blocks=reception.num_verified,
            num_bytes=reception.num_verified * reception.layout.bytes_per_block,
            transfer_s=transfer_s,
            busy_s=min(transfer_s, measured.busy_s),
            exposed_s=min(transfer_s, final.finished_age_s + now_s - attempt.streams[0].ended_s),
            transport=self.name,
            num_streams=len(attempt.streams),
            num_retries=num_retries,
            measured=measured,
            manifest=final.manifest,
        )


class _Attempt:
    """All streams of one try, with one fate."""

    def __init__(
        self,
        reception: Reception,
        cancellation: Cancellation,
        peers: PeerBook,
        limits: StreamLimits,
        on_measured: Callable[[Measured], object],
    ) -> None:
        self._on_measured = on_measured
        self._reported = Measured("", "", 0, 0.0)
        self._reception = reception
        self._peers = peers
        self._limits = limits
        self._together = Cancellation(cancellation)
        self._lock = threading.Lock()
        self._first_error: TransferError | None = None
        self.streams: list[PullStream] = []

    @property
    def busy_s(self) -> float:
        """Time that the slowest stream needed the link."""
        return max((stream.busy_s for stream in self.streams), default=0.0)

    @property
    def measured(self) -> Measured:
        """What came over the link, from whom, and how fast; also of a failed attempt."""
        connection = next((stream.connection for stream in self.streams if stream.connection), None)
        num_bytes = sum(stream.num_bytes for stream in self.streams)
        if connection is None:
            return Measured("", "", 0, 0.0)
        return Measured(connection.pod, connection.node, num_bytes, self.busy_s)

    def report_rest(self) -> None:
        """Report what has come since the last window."""
        self._report(0, 0.0)

    def _report(self, least_bytes: int = WINDOW_BYTES, least_s: float = WINDOW_S) -> None:
        with self._lock:
            now, before = self.measured, self._reported
            num_bytes, busy_s = now.num_bytes - before.num_bytes, now.busy_s - before.busy_s
            if num_bytes < least_bytes or busy_s < least_s:
                return
            self._reported = now
        self._on_measured(replace(now, num_bytes=num_bytes, busy_s=busy_s))

    def run(self, threads: ThreadPoolExecutor, max_streams: int) -> Final:
        """Run the streams; on return or raise none of them runs any more."""
        self.streams = [
            PullStream(self._reception, pull, self._peers, self._limits, on_progress=self._report)
            for pull in self._plan(max_streams)
        ]
        others = [threads.submit(self._run_stream, stream) for stream in self.streams[1:]]
        try:
            self._run_stream(self.streams[0])
        finally:
            wait(others)
        try:
            for future in others:
                future.result()
            return self._check()
        except BaseException:  # whatever it was: no connection of this attempt is kept
            for stream in self.streams:
                if stream.connection is not None:
                    stream.connection.channel.close()
            raise

    def confirm(self, limits: Limits) -> None:
        """Let the peer free its blocks; keep the connections for the next pull."""
        release = Release(request_id=self._reception.request.request_id, pulled=True)
        for stream in self.streams:
            if stream.connection is None:
                continue
            if stream is self.streams[0]:
                with suppress(TransferError):  # the KV is here; over there its time to live ends it
                    stream.connection.channel.send(release, limits)
            self._peers.give(stream.connection)

    def _plan(self, max_streams: int) -> list[Pull]:
        reception = self._reception
        first_block = reception.first_missing
        bytes_per_block = reception.layout.bytes_per_block
        num_bytes = (reception.num_blocks - first_block) * bytes_per_block
        num_streams = choose_num_streams(num_bytes, max_streams)
        return [
            Pull(
                request_id=reception.request.request_id,
                engine_id=reception.request.engine_id,
                model_fingerprint=reception.model_fingerprint,
                first_block=first_block,
                num_blocks=reception.num_blocks,
                stream=stream,
                num_streams=num_streams,
                group_blocks=choose_group_blocks(bytes_per_block),
            )
            for stream in range(num_streams)
        ]

    def _run_stream(self, stream: PullStream) -> None:
        try:
            stream.run(self._together)
        except TransferError as error:
            with self._lock:  # the first one counts: later ones come from the wake-up
                self._first_error = self._first_error or error
            self._together.cancel()
        except BaseException:  # a defect: the other streams must not go on without this one
            self._together.cancel()
            raise

    def _check(self) -> Final:
        if self._first_error is not None:
            raise self._first_error
        final = self.streams[0].final
        if final is None:
            raise TransferError(TransferFailure.PROTOCOL, "the pull ended without a final manifest")
        self._reception.check_sealed(final.manifest)
        return final


def _probe(channel: Channel, num_bytes: int, limits: Limits) -> float:
    buffer = memoryview(bytearray(min(num_bytes, _PROBE_BUFFER_BYTES)))
    started_s = time.monotonic()
    channel.send(Probe(num_bytes=num_bytes), limits)
    frame = channel.receive(limits, max_header_bytes=MAX_SMALL_HEADER_BYTES, max_payload_bytes=num_bytes)
    if not isinstance(frame.message, ProbeData) or frame.payload_bytes != num_bytes:
        raise TransferError(TransferFailure.PROTOCOL, "the probe was not answered with its bytes")
    for offset in range(0, num_bytes, len(buffer)):
        channel.receive_into([buffer[: num_bytes - offset]], limits)
    return time.monotonic() - started_s

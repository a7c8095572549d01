"""From the engine's thread to one handler on the event loop, and who is in flight.

Knows outputs, threads and ids; knows nothing of HTTP. A queue is bounded by its request: the engine
gives at most one output per token and one for the end.
"""

import asyncio
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from phasesplit_worker.requests import EngineOutput, RequestTimings

ResultT = TypeVar("ResultT")

_MAX_REMEMBERED = 4096  # public ids
_MAX_TRIES = 16  # engine ids remembered of one public id
_MAX_ID_LENGTH = 128  # of the manifest's request_id


class OutputQueue:
    """Outputs of one request, in order, and the pull that must end before its blocks may go."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.pull: asyncio.Task[object] | None = None
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[EngineOutput | None] = asyncio.Queue()
        self._early: deque[EngineOutput] = deque()

    def on_output(self, output: EngineOutput) -> None:
        """Called on the engine thread."""
        self._put(output)

    def _put(self, item: EngineOutput | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:
            return  # the loop is closed: the process ends and nobody waits for this output

    def fail(self, message: str) -> None:
        """End the request from the event loop, because the engine no longer can."""
        self._queue.put_nowait(
            EngineOutput(
                request_id=self.request_id, finish_reason="error", error=message, timings=RequestTimings()
            )
        )

    async def next(self) -> EngineOutput:
        """The next output. The watchdog calls `fail` when the engine stops answering."""
        if self._early:
            return self._early.popleft()
        while True:
            output = await self._queue.get()
            if output is not None:
                return output

    async def settled(self, future: Future[ResultT], timeout_s: float) -> bool:
        """Wait for a future of the engine; False when the engine ends the request first.

        The future itself is never cancelled, which would surprise the engine thread. Raises
        TimeoutError.
        """
        future.add_done_callback(lambda _: self._put(None))
        async with asyncio.timeout(timeout_s):
            output = await self._queue.get()
        if output is not None:
            self._early.append(output)
        return output is None and not future.cancelled()


@dataclass
class _Tries:
    count: int = 0
    engine_ids: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_TRIES))


class OpenRequests:
    """Requests in flight, and the engine ids that each public request id had lately.

    A router may retry a leg under the same `x-request-id` while the KV of the first try is still
    held, so the engine gets an id of its own for every try.
    """

    def __init__(self) -> None:
        self._queues: dict[str, OutputQueue] = {}
        self._engine_ids: OrderedDict[str, _Tries] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, public_id: str) -> OutputQueue:
        """Register a try of a request under a new engine id; `close` must follow."""
        tries = self._engine_ids.setdefault(public_id, _Tries())
        self._engine_ids.move_to_end(public_id)
        tries.count += 1
        suffix = f"#{tries.count}" if tries.count > 1 else ""
        engine_id = public_id[: _MAX_ID_LENGTH - len(suffix)] + suffix
        tries.engine_ids.append(engine_id)
        if len(self._engine_ids) > _MAX_REMEMBERED:
            self._engine_ids.popitem(last=False)
        queue = self._queues[engine_id] = OutputQueue(engine_id)
        return queue

    def close(self, queue: OutputQueue) -> None:
        """The try has ended; its ids stay known for `/admin/cancel` and `/v1/kv`."""
        self._queues.pop(queue.request_id, None)

    def pull_of(self, engine_id: str) -> asyncio.Task[object] | None:
        """The pull in progress of this try, if any."""
        queue = self._queues.get(engine_id)
        return None if queue is None else queue.pull

    def is_known(self, request_id: str) -> bool:
        """Was there lately a try with this public or engine id?"""
        return request_id in self._engine_ids or request_id in self._queues

    def engine_ids(self, request_id: str) -> tuple[str, ...]:
        """Every known try of a public id, newest last; an engine id stands for itself."""
        tries = self._engine_ids.get(request_id)
        return (request_id,) if tries is None else tuple(tries.engine_ids)

    def fail_all(self, message: str) -> None:
        """End every request with an error."""
        for queue in list(self._queues.values()):
            queue.fail(message)

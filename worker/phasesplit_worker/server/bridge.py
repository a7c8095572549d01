"""From the engine's thread to one handler on the event loop.

Knows outputs and threads; knows nothing of HTTP. A queue is bounded by its request: the engine
gives at most one output per token and one for the end.
"""

import asyncio

from phasesplit_worker.requests import EngineOutput


class OutputQueue:
    """Outputs of one request, in order."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[EngineOutput] = asyncio.Queue()

    def on_output(self, output: EngineOutput) -> None:
        """Called on the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, output)
        except RuntimeError:
            return  # the loop is closed: the process ends and nobody waits for this output

    def fail(self, message: str) -> None:
        """End the request from the event loop, because the engine no longer can."""
        self._queue.put_nowait(EngineOutput(request_id=self.request_id, finish_reason="error", error=message))

    async def next(self) -> EngineOutput:
        """The next output. The watchdog calls `fail` when the engine stops answering."""
        return await self._queue.get()


class OpenRequests:
    """Requests in flight in this process, by engine id."""

    def __init__(self) -> None:
        self._queues: dict[str, OutputQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def unique_id(self, wanted: str) -> str:
        """`wanted`, or with a suffix where a retry of the same request is still being ended."""
        if wanted not in self._queues:
            return wanted
        number = 2
        while f"{wanted}#{number}" in self._queues:
            number += 1
        return f"{wanted}#{number}"

    def open(self, request_id: str) -> OutputQueue:
        """Register a request; `close` must follow."""
        queue = self._queues[request_id] = OutputQueue(request_id)
        return queue

    def close(self, request_id: str) -> None:
        """Forget a request."""
        self._queues.pop(request_id, None)

    def fail_all(self, message: str) -> None:
        """End every request with an error."""
        for queue in list(self._queues.values()):
            queue.fail(message)

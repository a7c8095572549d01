"""A relay that lets bytes pass at a given speed, as a slow network does."""

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass

_SMALLEST_BYTES, _LARGEST_BYTES = 4096, 65536  # of a piece, about 10 ms worth


@dataclass(slots=True)
class Relay:
    """Stands before a worker's port and passes so many bytes per second on each connection to it."""

    port: int
    bytes_per_s: float = math.inf

    @property
    def _piece_bytes(self) -> int:
        return int(min(_LARGEST_BYTES, max(_SMALLEST_BYTES, self.bytes_per_s / 100)))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        ends = (writer, up_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, is_slow=False)),
            asyncio.create_task(self._pump(up_reader, writer, is_slow=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in ends:
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_slow: bool
    ) -> None:
        free_at_s = time.monotonic()
        with contextlib.suppress(OSError):
            while data := await reader.read(self._piece_bytes):
                writer.write(data)
                await writer.drain()
                if is_slow and not math.isinf(self.bytes_per_s):
                    free_at_s = max(free_at_s, time.monotonic()) + len(data) / self.bytes_per_s
                    await asyncio.sleep(max(0.0, free_at_s - time.monotonic()))

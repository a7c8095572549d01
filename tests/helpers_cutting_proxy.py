"""A relay that breaks connections on the way, as networks do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class CuttingProxy:
    """Forwards to a port and cuts its first connections after some bytes."""

    def __init__(self, port: int, num_cuts: int, after_bytes: int) -> None:
        self._target = port
        self._cuts_left = num_cuts
        self._after_bytes = after_bytes
        self.num_connections = 0
        self.num_cut = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target)
        limit = None
        if self._cuts_left:
            self._cuts_left -= 1
            limit = self._after_bytes
        up = asyncio.create_task(self._pump(reader, upstream_writer, None))
        is_cut = await self._pump(upstream_reader, writer, limit)
        self.num_cut += is_cut
        up.cancel()
        for end in (writer, upstream_writer):
            with contextlib.suppress(OSError):
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> bool:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                passed += len(data)
                if limit is not None and passed > limit:
                    return True
                writer.write(data)
                await writer.drain()
        return False


@contextlib.asynccontextmanager
async def cutting_proxy(
    port: int, num_cuts: int, after_bytes: int
) -> AsyncIterator[tuple[CuttingProxy, int]]:
    """The proxy and the port it listens on."""
    proxy = CuttingProxy(port, num_cuts, after_bytes)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    try:
        yield proxy, server.sockets[0].getsockname()[1]
    finally:
        server.close()

"""Listens for KV connections: one thread each, bounded in number, refusals counted by reason.

Peers that have not proven the key have a smaller bound of their own and a few seconds, so that they
cannot keep the others out. Knows sockets and threads; `tcp_session` knows the protocol.
"""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from phasesplit_worker.requests import KVBlocks
from phasesplit_worker.transfer import auth
from phasesplit_worker.transfer.channel import Channel, Limits
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.messages import Error
from phasesplit_worker.transfer.store import KVStore
from phasesplit_worker.transfer.tcp_session import ServerIdentity, ServerLimits, Session, SessionContext

logger = logging.getLogger(__name__)

BACKLOG = 128
_LAST_WORD_S = 1.0
# The peer went away, or the end came in the middle of a frame: nothing can be said any more.
_SILENT_ENDS = frozenset({TransferFailure.CONNECT, TransferFailure.CANCELLED})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `::` takes IPv4 as well where the system allows it. Raises OSError."""
    if ":" not in host:
        return socket.create_server((host, port), backlog=BACKLOG)
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=is_dual)


def format_endpoint(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class TcpServer:
    """Listens on one port. `start` binds; `stop` closes every connection."""

    def __init__(
        self,
        store: KVStore,
        pool: KVBlocks,
        identity: ServerIdentity,
        key: bytes,
        *,
        host: str,
        port: int,
        limits: ServerLimits,
        on_refused: Callable[[TransferFailure], None],
    ) -> None:
        auth.check_key(key)
        self._address = (host, port)
        self._limits = limits
        self._on_refused = on_refused
        self._is_stopped = threading.Event()
        self._context = SessionContext(
            store=store,
            pool=pool,
            identity=identity,
            key=key,
            limits=limits,
            is_stopped=self._is_stopped.is_set,
        )
        self._lock = threading.Lock()
        self._connections: dict[Channel, threading.Thread] = {}
        self._num_unauthenticated = 0
        self._listener: socket.socket | None = None
        self._refused: Counter[TransferFailure] = Counter()

    def start(self) -> None:
        """Bind and listen. Raises OSError when the port is taken."""
        self._listener = listen(*self._address)
        self._address = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, args=(self._listener,), name="kv-accept", daemon=True).start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close listener and connections and wait for their threads."""
        self._is_stopped.set()
        if self._listener is not None:
            with suppress(OSError):  # wakes accept; a listener is not connected
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for channel in connections:
            channel.interrupt()
        deadline = time.monotonic() + timeout_s
        for thread in connections.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def port(self) -> int:
        """The port listened on; the one asked for until `start`."""
        return self._address[1]

    @property
    def num_connections(self) -> int:
        """Open connections, authenticated or not."""
        with self._lock:
            return len(self._connections)

    @property
    def refused(self) -> dict[str, int]:
        """Connections and requests turned away, by reason."""
        with self._lock:
            return {str(reason): count for reason, count in self._refused.items()}

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._is_stopped.is_set():
                    logger.warning("accepting a KV connection failed: %s", error)
                    self._is_stopped.wait(0.1)  # out of descriptors: do not spin
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection)
        except OSError:  # reset before it was looked at
            connection.close()
            return
        thread = threading.Thread(target=self._serve, args=(channel,), name="kv-serve", daemon=True)
        with self._lock:
            is_full = (
                len(self._connections) >= self._limits.max_connections
                or self._num_unauthenticated >= self._limits.max_unauthenticated
                or self._is_stopped.is_set()
            )
            if not is_full:
                self._num_unauthenticated += 1
                self._connections[channel] = thread
                thread.start()
        if is_full:
            self._count_refused(TransferFailure.CONNECT)
            channel.close()

    def _serve(self, channel: Channel) -> None:
        session = Session(channel, self._context)
        try:
            try:
                session.authenticate()
            finally:
                with self._lock:
                    self._num_unauthenticated -= 1
            while not self._is_stopped.is_set():
                session.serve_request()
        except TransferError as error:
            if error.reason not in _SILENT_ENDS:
                self._count_refused(error.reason)
                self._say(channel, error)
        finally:
            channel.close()
            with self._lock:
                self._connections.pop(channel, None)

    def _say(self, channel: Channel, error: TransferError) -> None:
        """Tell the peer why, if it still listens."""
        limits = Limits(deadline=time.monotonic() + _LAST_WORD_S, silence_s=_LAST_WORD_S)
        with suppress(TransferError):  # it does not listen: closing says enough
            channel.send(Error(reason=error.reason, message=str(error)), limits)

    def _count_refused(self, reason: TransferFailure) -> None:
        with self._lock:
            self._refused[reason] += 1
        self._on_refused(reason)

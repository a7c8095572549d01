"""Peers of the pulling side: authenticated connections kept for reuse, and pairs that misbehave.

A peer is an address; the process behind it is known by its engine id. When that changes, every
kept connection and belief about the old process is dropped. Knows handshakes, not pulls.
"""

import socket
import threading
import time
from dataclasses import dataclass, field

from phasesplit_worker.transfer import auth
from phasesplit_worker.transfer.channel import Channel, Limits
from phasesplit_worker.transfer.errors import PAIR_FAILURES, TransferError, TransferFailure
from phasesplit_worker.transfer.messages import MAX_SMALL_HEADER_BYTES, Challenge, Hello, Proof

MAX_IDLE_CONNECTIONS = 4  # per peer
MAX_IDLE_S = 60.0  # below the server's own limit
MAX_PEERS = 256
QUARANTINE_AFTER = 3  # failures in a row
FIRST_QUARANTINE_S = 2.0
LONGEST_QUARANTINE_S = 30.0

Address = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class LocalIdentity:
    """Who this worker is towards peers."""

    engine_id: str
    pod: str
    node: str


@dataclass(eq=False)
class Connection:
    """An authenticated connection and who is at its other end."""

    channel: Channel
    address: Address
    engine_id: str
    pod: str
    node: str
    is_reused: bool = False
    idle_since_s: float = 0.0


@dataclass
class _Peer:
    engine_id: str = ""
    idle: list[Connection] = field(default_factory=list)


class PeerBook:
    """Opens, keeps and drops connections. Thread-safe."""

    def __init__(self, local: LocalIdentity, key: bytes, *, connect_s: float = 2.0) -> None:
        auth.check_key(key)
        self._local = local
        self._key = key
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._peers: dict[Address, _Peer] = {}

    def take(self, address: Address, engine_id: str | None) -> Connection | None:
        """A kept connection to the process `engine_id` (None: any), if there is a usable one."""
        now_s = time.monotonic()
        while True:
            with self._lock:
                peer = self._peers.get(address)
                if peer is None or not peer.idle:
                    return None
                connection = peer.idle.pop()
            is_wanted = engine_id is None or connection.engine_id == engine_id
            is_fresh = now_s - connection.idle_since_s < MAX_IDLE_S
            if is_wanted and is_fresh and connection.channel.is_quiet():
                connection.is_reused = True
                return connection
            connection.channel.close()

    def give(self, connection: Connection) -> None:
        """Keep a connection between whole messages for the next pull."""
        connection.idle_since_s = time.monotonic()
        with self._lock:
            peer = self._peers.get(connection.address)
            is_kept = (
                peer is not None
                and peer.engine_id == connection.engine_id
                and len(peer.idle) < MAX_IDLE_CONNECTIONS
            )
            if peer is not None and is_kept:
                peer.idle.append(connection)
        if not is_kept:
            connection.channel.close()

    def connect(self, address: Address, engine_id: str | None, limits: Limits) -> Connection:
        """A new authenticated connection. Raises TransferError."""
        channel = self._dial(address, limits)
        try:
            challenge = self._shake_hands(channel, limits)
        except BaseException:  # whatever ended the handshake, the descriptor must not stay open
            channel.close()
            raise
        self._learn(address, challenge.engine_id)
        if engine_id is not None and challenge.engine_id != engine_id:
            channel.close()
            raise TransferError(
                TransferFailure.ENGINE_ID, f"the worker at {address[0]} was restarted since the prefill"
            )
        return Connection(channel, address, challenge.engine_id, challenge.pod, challenge.node)

    def forget(self, address: Address) -> None:
        """Drop every kept connection to a peer."""
        with self._lock:
            peer = self._peers.pop(address, None)
        for connection in peer.idle if peer is not None else ():
            connection.channel.close()

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            addresses = list(self._peers)
        for address in addresses:
            self.forget(address)

    def _dial(self, address: Address, limits: Limits) -> Channel:
        limits.check(time.monotonic())
        wait_s = min(self._connect_s, max(0.01, limits.deadline - time.monotonic()))
        try:
            return Channel(socket.create_connection(address, timeout=wait_s))
        except OSError as error:
            raise TransferError(
                TransferFailure.CONNECT, f"no connection to {address[0]}:{address[1]} ({error})"
            ) from error

    def _shake_hands(self, channel: Channel, limits: Limits) -> Challenge:
        nonce = auth.new_nonce()
        me = self._local
        channel.send(Hello(nonce=nonce, engine_id=me.engine_id, pod=me.pod, node=me.node), limits)
        challenge = channel.receive(limits, max_header_bytes=MAX_SMALL_HEADER_BYTES).message
        if not isinstance(challenge, Challenge):
            raise TransferError(TransferFailure.AUTH, "the peer did not answer the HELLO with a CHALLENGE")
        parts = auth.Parts(nonce, challenge.nonce, me.engine_id, challenge.engine_id)
        if not auth.is_proof(auth.prove(self._key, auth.SERVER_LABEL, parts), challenge.proof):
            raise TransferError(TransferFailure.AUTH, "the peer does not hold this object's transfer key")
        channel.send(Proof(proof=auth.prove(self._key, auth.CLIENT_LABEL, parts)), limits)
        return challenge

    def _learn(self, address: Address, engine_id: str) -> None:
        """Note who is there now; a restarted peer's old connections go."""
        with self._lock:
            is_known = address in self._peers and self._peers[address].engine_id == engine_id
        if not is_known:
            self.forget(address)
        with self._lock:
            while len(self._peers) >= MAX_PEERS and address not in self._peers:
                oldest = next(iter(self._peers))
                for connection in self._peers.pop(oldest).idle:
                    connection.channel.close()
            self._peers.setdefault(address, _Peer(engine_id=engine_id))


@dataclass
class _PairHealth:
    num_failures: int = 0
    reason: TransferFailure = TransferFailure.CONNECT
    until_s: float = 0.0


class Quarantine:
    """Pairs that failed several times in a row rest, twice as long after each further failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: dict[str, _PairHealth] = {}

    def check(self, peer: str, now_s: float) -> None:
        """Raise TransferError with the last reason while the pair rests."""
        with self._lock:
            pair = self._pairs.get(peer)
            if pair is not None and now_s < pair.until_s:
                raise TransferError(
                    pair.reason,
                    f"pulls from {peer} rest for {pair.until_s - now_s:.1f} s "
                    f"after {pair.num_failures} failures in a row",
                )

    def succeeded(self, peer: str) -> None:
        """A pull went well: forget the failures."""
        with self._lock:
            self._pairs.pop(peer, None)

    def failed(self, peer: str, reason: TransferFailure, now_s: float) -> None:
        """Count a failure of the pair; a restarted peer starts afresh."""
        with self._lock:
            if reason is TransferFailure.ENGINE_ID:
                self._pairs.pop(peer, None)
            if reason not in PAIR_FAILURES:
                return
            while len(self._pairs) >= MAX_PEERS and peer not in self._pairs:
                del self._pairs[next(iter(self._pairs))]
            pair = self._pairs.setdefault(peer, _PairHealth())
            pair.num_failures += 1
            pair.reason = reason
            excess = pair.num_failures - QUARANTINE_AFTER
            if excess >= 0:
                rest_s = min(LONGEST_QUARANTINE_S, FIRST_QUARANTINE_S * 2.0 ** min(excess, 16))
                pair.until_s = now_s + rest_s

    def resting(self, now_s: float) -> dict[str, float]:
        """Peers that rest, with the seconds left."""
        with self._lock:
            return {peer: pair.until_s - now_s for peer, pair in self._pairs.items() if pair.until_s > now_s}

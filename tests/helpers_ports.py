"""Ports for the processes that tests start."""

import itertools
import os
import socket

# Below what the kernel gives to clients, so that no connection takes a port between its choice and its use.
_FIRST, _PER_PROCESS, _PROCESSES = 11_000, 300, 41
_offsets = itertools.count()


def free_port() -> int:
    """A port nobody listens on now. Processes that run at once choose from ranges of their own."""
    base = _FIRST + os.getpid() % _PROCESSES * _PER_PROCESS
    for _ in range(_PER_PROCESS):
        port = base + next(_offsets) % _PER_PROCESS
        with socket.socket() as probe:
            # As servers do: a port is free while old connections to it wait for their end.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"ports {base} to {base + _PER_PROCESS - 1} are all taken")

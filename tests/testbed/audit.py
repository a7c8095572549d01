"""Reads the API server's audit log: who did what, without bodies.

What Kubernetes does for itself is not in the log; users are, and the service accounts of all that is
installed. A line is in the file when the request is answered, so a test needs no wait before it reads.
The API server starts a new file when one is full and keeps a few old ones beside it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from testbed.errors import TestbedError

MUTATING_VERBS = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True)
class AuditEvent:
    """One finished request."""

    at: datetime
    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    user_agent: str

    @property
    def is_mutating(self) -> bool:
        return self.verb in MUTATING_VERBS

    @property
    def is_lease(self) -> bool:
        return (self.group, self.resource) == ("coordination.k8s.io", "leases")

    def __str__(self) -> str:
        kind = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return (
            f"{self.at:%H:%M:%S} {self.user} {self.verb} {kind} {self.namespace}/{self.name} -> {self.code}"
        )


@dataclass(frozen=True)
class Mark:
    """A place in the log: a file, whatever its name has become, and bytes into it."""

    inode: int
    offset_bytes: int


class AuditLog:
    """The log of one running testbed. Events are read from a mark to the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self) -> Mark:
        """The end of the log now."""
        found = self._path.stat()
        return Mark(found.st_ino, found.st_size)

    def events(
        self, since: Mark | None = None, user: str | None = None, verbs: frozenset[str] | None = None
    ) -> list[AuditEvent]:
        """Finished requests after a mark, of users whose name starts with `user`, with one of `verbs`.

        Without a mark: all that is kept.
        """
        return [
            event
            for event in self._read(since)
            if (user is None or event.user.startswith(user)) and (verbs is None or event.verb in verbs)
        ]

    def _read(self, since: Mark | None) -> Iterator[AuditEvent]:
        with ExitStack() as opened:
            files = self._open(opened)
            if since is not None:
                inodes = [os.fstat(file.fileno()).st_ino for file in files]
                if since.inode not in inodes:
                    raise TestbedError(f"{self._path.name} has been rotated away since the mark was set")
                files = files[inodes.index(since.inode) :]
                files[0].seek(since.offset_bytes)
            for file in files:
                yield from _read_events(file)

    def _open(self, opened: ExitStack) -> list[BinaryIO]:
        """The old files and the current one, in the order in which they were written."""
        while True:
            current = opened.enter_context(self._path.open("rb"))
            # Named by the time at which they were put aside.
            names = sorted(self._path.parent.glob(f"{self._path.stem}-*{self._path.suffix}"))
            inode = os.fstat(current.fileno()).st_ino
            try:
                old = [opened.enter_context(name.open("rb")) for name in names]
                if self._path.stat().st_ino == inode:
                    return [*old, current]
            except FileNotFoundError:
                continue  # rotated in between: look again


def _read_events(file: BinaryIO) -> Iterator[AuditEvent]:
    for line in file:
        if not line.endswith(b"\n"):
            return  # the line is being written
        content = json.loads(line)
        if content["stage"] != "ResponseStarted":  # a watch is reported again when it ends
            yield parse_event(content)


def service_account(namespace: str, name: str) -> str:
    """The user name of a service account."""
    return f"system:serviceaccount:{namespace}:{name}"


def parse_event(content: dict[str, object]) -> AuditEvent:
    """From one line of the log in the form of audit.k8s.io/v1."""

    def part(key: str) -> dict[str, object]:
        value = content.get(key)
        return value if isinstance(value, dict) else {}

    target, status = part("objectRef"), part("responseStatus")
    return AuditEvent(
        at=datetime.fromisoformat(str(content["requestReceivedTimestamp"])),
        user=str(part("user").get("username", "")),
        verb=str(content["verb"]),
        group=str(target.get("apiGroup", "")),
        resource=str(target.get("resource", content.get("requestURI", ""))),
        subresource=str(target.get("subresource", "")),
        namespace=str(target.get("namespace", "")),
        name=str(target.get("name", "")),
        code=int(str(status.get("code", 0))),
        user_agent=str(content.get("userAgent", "")),
    )

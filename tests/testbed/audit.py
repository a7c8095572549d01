"""Reads the API server's audit log: who did what, without bodies.

What Kubernetes does for itself is not in the log; users are, and the service accounts of all that is
installed. A line is in the file when the request is answered, so a test needs no wait before it reads.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

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


class AuditLog:
    """The log of one running testbed. A mark is a place in it; events are read from a mark to the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self) -> int:
        return self._path.stat().st_size

    def events(
        self, since: int = 0, user: str | None = None, verbs: frozenset[str] | None = None
    ) -> list[AuditEvent]:
        """Finished requests after a mark, of users whose name starts with `user`, with one of `verbs`."""
        return [
            event
            for event in self._read(since)
            if (user is None or event.user.startswith(user)) and (verbs is None or event.verb in verbs)
        ]

    def _read(self, since: int) -> Iterator[AuditEvent]:
        with self._path.open("rb") as log:
            log.seek(since)
            for line in log:
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

"""A Lease, so that of two running copies of the operator only one ever writes.

The holder renews; a copy that could not renew for `duration_s` stops writing before another may take
over (its own clock counts from the last successful renewal). Clocks of two machines are not compared:
a candidate takes the Lease only after it has seen the same `renewTime` for a whole duration.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from phasesplit.cluster.client import Cluster
from phasesplit.cluster.errors import ClusterError, ConflictError, NotFoundError
from phasesplit.cluster.kinds import LEASE

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True)
class LeaseSettings:
    """Which Lease, and how it is kept."""

    namespace: str
    name: str
    identity: str
    duration_s: float = 30.0
    renew_s: float = 5.0
    attempt_s: float = 8.0  # one try to renew, so that several fit into the duration


class LeaseKeeper:
    """Takes the Lease, keeps it, and says whether this copy still holds it."""

    def __init__(self, cluster: Cluster, settings: LeaseSettings, monotonic: Clock) -> None:
        self._cluster = cluster
        self._settings = settings
        self._monotonic = monotonic
        self._renewed_at_s: float | None = None
        self._seen: tuple[str, str] = ("", "")  # holder and renewTime last seen
        self._seen_at_s = 0.0

    def is_held(self) -> bool:
        """May this copy write now?"""
        return self._renewed_at_s is not None and (
            self._monotonic() - self._renewed_at_s < self._settings.duration_s - 1.0
        )

    async def acquire(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Wait until this copy holds the Lease."""
        waiting_for = ""
        while not await self._attempt():
            holder = self._seen[0]
            if holder != waiting_for:
                logger.info("waiting: the lease %s is held by %s", self._settings.name, holder)
                waiting_for = holder
            heartbeat()
            await asyncio.sleep(min(2.0, self._settings.renew_s))
        logger.info("holding the lease %s/%s", self._settings.namespace, self._settings.name)

    async def keep(self, on_lost: Callable[[], Awaitable[None]]) -> None:
        """Renew for as long as the task lives; calls `on_lost` and returns when another copy has it.

        While an API server answers too slowly nothing is written, and it goes on once it answers again.
        """
        while True:
            await asyncio.sleep(self._settings.renew_s)
            if await self._attempt() or self.is_held():
                continue
            if self._seen[0] not in ("", self._settings.identity):
                logger.error("%s holds the lease %s now; this copy stops", self._seen[0], self._settings.name)
                await on_lost()
                return
            logger.warning("the lease %s has expired; nothing is written meanwhile", self._settings.name)

    async def seize(self) -> None:
        """Take the Lease whoever holds it. The holder notices with its next renewal and stops writing."""
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind}
        metadata = {"name": self._settings.name, "namespace": self._settings.namespace}
        await self._cluster.apply(
            {**body, "metadata": metadata, "spec": self._spec(None)}, self._settings.identity
        )

    async def release(self) -> None:
        """Give the Lease back, so that a successor need not wait for it to expire."""
        if not self.is_held():
            return
        self._renewed_at_s = None
        try:
            lease = await self._cluster.get(LEASE, self._settings.namespace, self._settings.name)
            if lease.get("spec", {}).get("holderIdentity") == self._settings.identity:
                lease["spec"]["holderIdentity"] = ""
                lease["metadata"].pop("managedFields", None)
                await self._cluster.replace(lease, self._settings.identity)
        except ClusterError as error:
            logger.info("the lease was not given back and expires by itself: %s", error)

    async def _attempt(self) -> bool:
        """One try to take or renew. An API server that is away is no reason to stop trying."""
        started_at_s = self._monotonic()
        try:
            async with asyncio.timeout(self._settings.attempt_s):
                taken = await self._take()
        except ConflictError:
            return False
        except TimeoutError:
            logger.warning("the lease %s was not renewed in time; trying again", self._settings.name)
            return False
        except ClusterError as error:
            logger.warning("%s", error)
            return False
        if taken:
            self._renewed_at_s = started_at_s
        return taken

    async def _take(self) -> bool:
        settings = self._settings
        try:
            lease = await self._cluster.get(LEASE, settings.namespace, settings.name)
        except NotFoundError:
            metadata = {"name": settings.name, "namespace": settings.namespace}
            body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata}
            await self._cluster.create({**body, "spec": self._spec(None)}, settings.identity)
            return True
        spec = lease.get("spec", {})
        self._observe(spec)
        holder = spec.get("holderIdentity")
        if self._renewed_at_s is not None and holder != settings.identity:
            # Somebody took it on purpose (the chart's pre-delete hook does): stop writing at once.
            self._renewed_at_s = None
            return False
        expired = self._monotonic() - self._seen_at_s >= spec.get("leaseDurationSeconds", settings.duration_s)
        if holder and holder != settings.identity and not expired:
            return False
        lease["metadata"].pop("managedFields", None)
        lease["spec"] = self._spec(spec)
        await self._cluster.replace(lease, settings.identity)
        return True

    def _observe(self, spec: dict[str, Any]) -> None:
        seen = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if seen != self._seen:
            self._seen = seen
            self._seen_at_s = self._monotonic()

    def _spec(self, before: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        mine = before is not None and before.get("holderIdentity") == self._settings.identity
        transitions = (before or {}).get("leaseTransitions", 0) + (0 if mine or before is None else 1)
        return {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": round(self._settings.duration_s),
            "acquireTime": (before or {}).get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

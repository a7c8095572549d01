"""The Lease: one writer at any time, also when clocks, network or a second copy misbehave."""

import asyncio
import copy
from typing import Any

from phasesplit.cluster.errors import ConflictError, NotFoundError, UnavailableError
from phasesplit.cluster.lease import LeaseKeeper, LeaseSettings


class Leases:
    """One Lease with the API server's optimistic locking."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None
        self.away = False
        self.writes = 0

    async def get(self, kind: object, namespace: str, name: str) -> dict[str, Any]:
        self._check()
        if self.body is None:
            raise NotFoundError("no lease")
        return copy.deepcopy(self.body)

    async def create(self, body: dict[str, Any], manager: str) -> dict[str, Any]:
        self._check()
        if self.body is not None:
            raise ConflictError("exists")
        return self._store(body)

    async def replace(self, body: dict[str, Any], manager: str) -> dict[str, Any]:
        self._check()
        if self.body is None or body["metadata"]["resourceVersion"] != self.version:
            raise ConflictError("changed")
        return self._store(body)

    async def apply(self, body: dict[str, Any], manager: str) -> dict[str, Any]:
        self._check()
        return self._store(body)

    @property
    def version(self) -> str:
        return str(self.writes)

    def _check(self) -> None:
        if self.away:
            raise UnavailableError("away")

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.writes += 1
        self.body = copy.deepcopy(body)
        self.body["metadata"]["resourceVersion"] = self.version
        return self.body


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def keeper(leases: Leases, identity: str, time: Time) -> LeaseKeeper:
    settings = LeaseSettings("ns", "lease", identity, duration_s=15, renew_s=5)
    return LeaseKeeper(leases, settings, time)  # type: ignore[arg-type]


async def test_the_first_copy_takes_it_and_the_second_does_not() -> None:
    leases, time = Leases(), Time()
    one, two = keeper(leases, "one", time), keeper(leases, "two", time)
    assert await one._attempt() and one.is_held()
    assert not await two._attempt() and not two.is_held()


async def test_who_does_not_renew_stops_before_another_may_start() -> None:
    leases, time = Leases(), Time()
    one, two = keeper(leases, "one", time), keeper(leases, "two", time)
    await one._attempt()
    await two._attempt()
    time.now_s += 14
    assert not one.is_held()
    assert not await two._attempt()
    time.now_s += 1
    assert await two._attempt() and two.is_held()
    assert not await one._attempt()


async def test_a_renewal_that_was_seen_counts_from_when_it_was_seen() -> None:
    leases, time = Leases(), Time()
    one, two = keeper(leases, "one", time), keeper(leases, "two", time)
    await one._attempt()
    await two._attempt()
    time.now_s += 10
    await one._attempt()
    await two._attempt()
    time.now_s += 10
    assert not await two._attempt()


async def test_an_api_server_that_is_away_ends_the_right_to_write_in_time() -> None:
    leases, time = Leases(), Time()
    one = keeper(leases, "one", time)
    await one._attempt()
    leases.away = True
    time.now_s += 5
    assert not await one._attempt()
    assert one.is_held()
    time.now_s += 9
    assert not one.is_held()
    leases.away = False
    assert await one._attempt() and one.is_held()


async def test_a_released_lease_is_taken_at_once() -> None:
    leases, time = Leases(), Time()
    one, two = keeper(leases, "one", time), keeper(leases, "two", time)
    await one._attempt()
    await one.release()
    assert not one.is_held()
    assert await two._attempt()


async def test_a_seized_lease_stops_the_holder_with_its_next_renewal() -> None:
    leases, time = Leases(), Time()
    one, hook = keeper(leases, "one", time), keeper(leases, "hook", time)
    await one._attempt()
    await hook.seize()
    assert not await one._attempt()
    assert not one.is_held()
    time.now_s += 10
    assert not await one._attempt(), "it waits for the whole duration of the new holder"


async def test_of_two_copies_that_start_at_once_one_wins() -> None:
    leases, time = Leases(), Time()
    one, two = keeper(leases, "one", time), keeper(leases, "two", time)
    await one._attempt()
    leases.body["spec"]["holderIdentity"] = ""  # type: ignore[index]
    stale = await leases.get(None, "ns", "lease")
    assert await two._attempt()
    stale["spec"]["holderIdentity"] = "one"
    try:
        await leases.replace(stale, "one")
    except ConflictError:
        assert not await one._attempt()


async def test_a_slow_api_server_is_no_reason_to_end_but_another_holder_is() -> None:
    leases, time = Leases(), Time()
    settings = LeaseSettings("ns", "lease", "one", duration_s=15, renew_s=0.001)
    one = LeaseKeeper(leases, settings, time)  # type: ignore[arg-type]
    await one._attempt()
    lost: list[bool] = []

    async def on_lost() -> None:
        lost.append(True)

    leases.away = True
    time.now_s += 60
    keeping = asyncio.create_task(one.keep(on_lost))
    await asyncio.sleep(0.05)
    assert not lost and not one.is_held()
    leases.away = False
    await asyncio.sleep(0.05)
    assert not lost and one.is_held()
    await keeper(leases, "two", time).seize()
    await asyncio.wait_for(keeping, 1)
    assert lost == [True]

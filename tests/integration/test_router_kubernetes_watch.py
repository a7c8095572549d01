"""The router process on a Kubernetes API that changes, forgets, breaks and goes away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from helpers_fake_worker import FakeCluster, FakeWorker, expected_text
from helpers_router import RouterProcess, colocated_table, split_table, wait_until
from helpers_watch_api import WatchApi
from phasesplit.api.names import Pool

pytestmark = pytest.mark.integration
QUESTION = "Who watches?"
ANSWER = expected_text(f"user:{QUESTION}")


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[WatchApi, RouterProcess, FakeWorker, FakeWorker]]:
    cluster = FakeCluster()
    api = await WatchApi().start()
    prefill = await FakeWorker(cluster, "obj-prefill-0", Pool.PREFILL).start()
    decode = await FakeWorker(cluster, "obj-decode-0", Pool.DECODE).start()
    router = RouterProcess(kubeconfig=api.kubeconfig(folder / "kubeconfig"))
    try:
        api.put_table(split_table())
        api.put_workers("obj-prefill", [prefill])
        api.put_workers("obj-decode", [decode])
        await router.start()
        await router.wait_polled([prefill, decode])
        yield api, router, prefill, decode
        assert "Traceback" not in router.log(), router.log()
    finally:
        await router.stop()
        for part in (api, prefill, decode):
            await part.stop()


async def test_changes_reach_the_router(tmp_path: Path) -> None:
    async with running(tmp_path) as (api, router, _, decode):
        seen = await router.stream(router.chat_body(QUESTION))
        assert seen.text == ANSWER
        assert seen.headers["x-phasesplit-pair"] == "obj-prefill-0,obj-decode-0"
        api.put("configmaps", "other", {"data": {"routing.json": "{}"}})
        api.put_table(colocated_table(2))
        await router.wait_version(2, 3)
        # An older table, an unreadable one and a deleted one change nothing.
        api.put_table(split_table(1))
        api.put("configmaps", "obj-routing", {"data": {"routing.json": "{"}})
        api.delete("configmaps", "obj-routing")
        api.delete("endpointslices", "obj-prefill-0-slice")
        api.put_workers("obj-decode", [decode], terminating=True)

        async def nobody() -> bool:
            return (await router.post(router.chat_body(QUESTION)))[0] == 503

        await wait_until(nobody)
        assert (await router.report()).table_version == 2
        api.put_workers("obj-decode", [decode])

        async def somebody() -> bool:
            return (await router.post(router.chat_body(QUESTION)))[0] == 200

        await wait_until(somebody)


async def test_it_serves_on_while_the_api_is_away_and_catches_up(tmp_path: Path) -> None:
    async with running(tmp_path) as (api, router, _, _):
        await api.stop()
        for _ in range(3):
            assert (await router.stream(router.chat_body(QUESTION))).text == ANSWER
            await asyncio.sleep(0.3)
        api.put_table(colocated_table(5))
        await api.start()
        await router.wait_version(5, 20)
        assert (await router.stream(router.chat_body(QUESTION))).headers["x-phasesplit-mode"] == "Colocated"


async def test_it_lists_again_after_410(tmp_path: Path) -> None:
    async with running(tmp_path) as (api, router, _, _):
        lists = api.lists
        api.forget()
        api.put_table(colocated_table(7))
        await router.wait_version(7, 10)
        assert api.lists > lists

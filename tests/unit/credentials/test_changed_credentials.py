"""A Secret made anew is noticed by router and worker alike."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from phasesplit_router import credentials as router_credentials
from phasesplit_worker.server import credentials as worker_credentials

Watch = Callable[..., Awaitable[None]]
WATCHES = [router_credentials.wait_for_change, worker_credentials.wait_for_change]


@pytest.mark.parametrize("watch", WATCHES)
async def test_new_content_is_noticed(watch: Watch, tmp_path: Path) -> None:
    token = tmp_path / "admin-token"
    token.write_text("old")
    task = asyncio.ensure_future(watch((None, token), check_s=0.01))
    await asyncio.sleep(0.05)
    assert not task.done()
    token.write_text("new")
    await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("watch", WATCHES)
async def test_a_file_being_swapped_or_written_again_is_no_change(watch: Watch, tmp_path: Path) -> None:
    token = tmp_path / "admin-token"
    token.write_text("old")
    task = asyncio.ensure_future(watch((token,), check_s=0.01))
    token.unlink()
    await asyncio.sleep(0.05)
    token.write_text("old")
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()

"""A Secret made anew is noticed by router and worker alike."""

import asyncio
from pathlib import Path

from phasesplit_http.credentials import wait_for_change


async def test_new_content_is_noticed(tmp_path: Path) -> None:
    token = tmp_path / "admin-token"
    token.write_text("old")
    task = asyncio.ensure_future(wait_for_change((None, token), check_s=0.01))
    await asyncio.sleep(0.05)
    assert not task.done()
    token.write_text("new")
    await asyncio.wait_for(task, 5)


async def test_a_file_being_swapped_or_written_again_is_no_change(tmp_path: Path) -> None:
    token = tmp_path / "admin-token"
    token.write_text("old")
    task = asyncio.ensure_future(wait_for_change((token,), check_s=0.01))
    token.unlink()
    await asyncio.sleep(0.05)
    token.write_text("old")
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()

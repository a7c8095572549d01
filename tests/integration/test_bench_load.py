"""`python -m phasesplit_bench run` against a real router process with scripted workers."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from helpers_router import ROOT, running_site

pytestmark = pytest.mark.integration


async def _bench(*flags: str) -> tuple[int, str, str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("worker", "operator"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "phasesplit_bench",
        "run",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_open_and_closed_loop_report_what_happened(tmp_path: Path) -> None:
    async with running_site() as site:
        site.prefills[0].prefill_s = 0.02
        lines = tmp_path / "results.jsonl"
        code, out, err = await _bench(
            *("--url", site.router.url, "--rate", "20", "--duration-s", "1.5", "--prompt-tokens", "50:100"),
            *("--output-tokens", "4", "--class", "batch", "--ttft-s", "5", "--tpot-s", "1"),
            *("--output", str(lines), "--json"),
        )
        assert code == 0, err
        summary = json.loads(out.splitlines()[-1])
        assert summary["requests"] == summary["finished"] == summary["attained"] > 10
        assert summary["attainment"] == 1.0
        assert summary["ttft_s"]["p50"] >= 0.02
        assert "second-token gap" in err
        results = [json.loads(line) for line in lines.read_text().splitlines()]
        assert len(results) == summary["requests"]
        assert {item["slo_class"] for item in results} == {"batch"}
        assert {item["output_tokens"] for item in results} == {4}
        assert {item["pair"] for item in results} == {"obj-prefill-0,obj-decode-0"}
        code, out, _ = await _bench(
            "--url", site.router.url + "/v1", "--concurrency", "2", "--duration-s", "0.5"
        )
        assert code == 0
        assert "0 failed" in out


async def test_a_wrong_address_is_one_sentence() -> None:
    code, _, err = await _bench("--url", "http://127.0.0.1:9", "--rate", "1")
    assert code == 2
    assert "http://127.0.0.1:9/v1/models cannot be read" in err
    assert "Traceback" not in err

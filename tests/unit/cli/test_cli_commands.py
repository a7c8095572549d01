"""The command line's own part: help, formats, errors as sentences. The cluster is elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from kubernetes.client import Configuration
from kubernetes.config import kube_config
from rich.console import Console

from phasesplit.api.legs import LegReport
from phasesplit.api.reports import KVTrace
from phasesplit.api.routing import ServedMode
from phasesplit.cli.explain import checks_table, evidence_source, explanation, trial_sentence
from phasesplit.cli.kv import trace_table
from phasesplit.cli.main import main
from phasesplit.cli.output import bytes_text, milliseconds, rate_text
from phasesplit.cli.status import conditions_table, pools_table


class Answer(NamedTuple):
    """What a command printed, and the status it ended with."""

    returncode: int
    stdout: str
    stderr: str


class CommandLine:
    """Runs the command line in this process: a process of its own is two seconds of imports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, kubeconfig: Path = Path("/nonexistent/config")) -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["phasesplit", *arguments])
        # The client reads KUBECONFIG when it is imported, and keeps the file's settings as its default.
        self._monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        self._monkeypatch.setattr(Configuration, "_default", None)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self._capsys.readouterr()
        return Answer(int(ended.value.code or 0), printed.out, printed.err)


@pytest.fixture
def phasesplit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def rendered(table: object) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize("command", [["status"], ["explain"], ["kv", "inspect"]])
def test_help_has_examples(command: list[str], phasesplit: CommandLine) -> None:
    done = phasesplit(*command, "--help")
    assert done.returncode == 0
    assert "Examples" in done.stdout


def test_no_kubeconfig_is_one_sentence() -> None:
    """The installed program, in a process of its own."""
    program = Path(sys.executable).with_name("phasesplit")
    done = subprocess.run(
        [str(program), "status"],
        capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/nonexistent/config"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "kubeconfig" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", ["clusters: [", "text", "[1, 2]", "", "contexts: 1", None])
def test_an_unusable_kubeconfig_is_one_sentence(
    content: str | None, tmp_path: Path, phasesplit: CommandLine
) -> None:
    config = tmp_path / "config"
    if content is None:
        config.mkdir()
    else:
        config.write_text(content)
    done = phasesplit("status", kubeconfig=config)
    assert done.returncode == 1
    assert "no usable kubeconfig" in done.stderr
    assert "set KUBECONFIG" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_unreachable_api_server_is_one_sentence(tmp_path: Path, phasesplit: CommandLine) -> None:
    config = tmp_path / "config"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )  # fmt: skip
    done = phasesplit("status", kubeconfig=config)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["operator", "router", "worker"])
def test_programs_answer_help(command: str, phasesplit: CommandLine) -> None:
    done = phasesplit(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (2 << 50, "2,048.0 TiB")],
)
def test_bytes_have_binary_units(value: float | None, text: str) -> None:
    assert bytes_text(value) == text
    assert rate_text(value) == (text if value is None else f"{text}/s")


def test_milliseconds() -> None:
    assert milliseconds(1.2345) == "1,234 ms"
    assert milliseconds(None) == "-"


def leg(pod: str, role: str, **facts: object) -> LegReport:
    return LegReport(
        request_id="r1", pod=pod, node="n", role=role, num_prompt_tokens=1000, num_output_tokens=8, **facts
    )


def test_a_trace_names_both_pods_and_the_transfer() -> None:
    trace = KVTrace(
        request_id="r1", mode=ServedMode.SPLIT, slo_class="default", ttft_s=1.0,
        prefill=leg("chat-prefill-0", "prefill"),
        decode=leg(
            "chat-decode-0", "decode", kv_bytes=46_080_000, kv_transport="TCP",
            kv_transfer_s=0.5, kv_busy_s=0.4,
        ),
    )  # fmt: skip
    text = rendered(trace_table(trace))
    for part in ("chat-prefill-0", "chat-decode-0", "43.9 MiB", "TCP", "500 ms", "109.9 MiB/s"):
        assert part in text


def test_a_local_answer_has_one_pod_and_a_recompute_its_reason() -> None:
    trace = KVTrace(
        request_id="r1", mode=ServedMode.COLOCATED, slo_class="default",
        decode=leg("chat-decode-0", "colocated", recomputed="checksum"),
    )  # fmt: skip
    text = rendered(trace_table(trace))
    assert "served by" in text
    assert "checksum" in text


STATUS = {
    "mode": "Colocated",
    "decision": {"mode": "Colocated", "reason": "LinkDegraded", "message": "6.2 MB/s of 16 MB/s"},
    "pools": [{"name": "prefill", "desired": 1, "ready": 1, "updated": 1, "gpus": 0, "nodes": ["a"]}],
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "AllServing", "message": "2 of 2"},
        {"type": "Stalled", "status": "False", "reason": "Settled", "message": ""},
    ],
}


def test_explanation_answers_each_question() -> None:
    answer = explanation(
        {"metadata": {"namespace": "a", "name": "chat"}, "spec": {"mode": "Split"}, "status": STATUS}
    )
    assert answer["wanted"] == "Split"
    assert answer["served"] == "Colocated"
    assert answer["whyThisMode"]["reason"] == "LinkDegraded"


def test_evidence_list_and_flips_are_answers_of_their_own() -> None:
    evidence = {
        "source": "Replay",
        "replayedAt": "2026-01-01T00:00:00Z",
        "requests": 812,
        "gainPercent": 12.0,
        "checks": [
            {"name": "enough traffic", "passed": True},
            {"name": "gain", "passed": False, "message": "1 %"},
        ],
        "flips": [{"what": "load", "factor": 2.0, "message": "Split with 4 requests/s instead of 2"}],
    }
    status = {**STATUS, "evidence": evidence}
    answer = explanation({"metadata": {"namespace": "a", "name": "chat"}, "spec": {}, "status": status})
    assert answer["whatWouldTurnIt"][0]["what"] == "load"
    assert "flips" not in answer["evidence"]
    assert "812 requests" in evidence_source(answer["evidence"])
    assert "formula" in evidence_source({"source": "ClosedForm"})
    arms = {"split": {"requests": 40, "attained": 30}, "colocated": {"requests": 50}}
    assert "split 30 of 40 in target, colocated 0 of 50" in trial_sentence({"running": True, **arms})
    assert "2 in a row" in trial_sentence({"failures": 2, "notBefore": "2026-01-01T00:00:00Z"})
    text = rendered(checks_table(answer["checks"]))
    assert "yes" in text
    assert "1 %" in text


def test_an_object_that_the_operator_has_not_seen_is_shown() -> None:
    answer = explanation({"metadata": {"namespace": "a", "name": "chat"}, "spec": {}})
    assert answer["served"] is None
    assert "POOL" in rendered(pools_table({}))
    assert "CONDITION" in rendered(conditions_table({}))


def test_conditions_are_listed_with_reason() -> None:
    text = rendered(conditions_table(STATUS))
    assert "AllServing" in text
    assert "Stalled" in text

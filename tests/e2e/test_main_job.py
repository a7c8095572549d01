"""The main job on a real cluster, by the very steps that `make demo` shows."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from demo import steps
from demo.chat import SHORT_QUESTION, Chat
from demo.steps import Load
from demo.subject import Subject
from demo.target import OPERATOR_NAMESPACE, PortForward, choose_target, wait_for
from soak.__main__ import Progress, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

# How long nothing may be written at rest; `REST_S=600 make test-cluster` for the whole ten minutes.
REST_S = float(os.environ.get("REST_S", "60"))


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    target = choose_target(print)
    target.helm_install()
    served = Subject(target)
    served.apply()
    served.wait_ready(600)
    served.wait_mode("Split", 120)
    yield served
    served.delete()
    target.helm_uninstall()  # other tests bring an operator of their own


@pytest.fixture(scope="module")
def forward(subject: Subject) -> Iterator[PortForward]:
    with PortForward(subject.kubectl, subject.namespace, f"{subject.name}-router", 80) as opened:
        yield opened


def test_at_rest_nothing_is_written(subject) -> None:
    """Mutating requests of everything we install, but for renewing the Lease."""
    subject.wait_ready(300)
    subject.wait_mode("Split", 300)
    # The first measurement of a link goes into the routing table, and may come late on a busy machine.
    wait_for("a measured link", lambda: subject.condition("LinkHealthy").get("status") == "True", 120)
    audit = subject.target.testbed.audit

    def written(seconds: float) -> list[str]:
        mark = audit.mark()
        time.sleep(seconds)
        events = audit.events(mark, user="system:serviceaccount:")
        return [str(event) for event in events if event.is_mutating and not event.is_lease]

    wait_for("the end of what was started before", lambda: not written(20), 400)
    events = written(REST_S)
    assert events == [], subject.kubectl(
        "logs", "-n", OPERATOR_NAMESPACE, "deployment/phasesplit-operator", "--tail=30"
    )


def test_answers_are_made_by_prefill_on_one_pod_and_decode_on_another(subject, forward) -> None:
    facts = steps.converse(subject, forward)
    assert facts.numbers["kv_bytes"] > 1e6


def test_pools_are_on_two_nodes(subject) -> None:
    nodes = {pod["spec"]["nodeName"] for pod in subject.pods("worker")}
    assert len(nodes) == 2


def test_text_equals_plain_transformers(subject, forward) -> None:
    answer = Chat(forward.url, subject.model).ask("short", SHORT_QUESTION, 24)
    steps.compare(subject, answer, SHORT_QUESTION, 24)


def test_rising_load_leads_to_a_decision_that_is_carried_out(subject, forward) -> None:
    steps.overload(subject, forward)


def test_a_slow_link_ends_the_split_and_loses_nothing(subject, forward) -> None:
    steps.degrade_link(subject, forward)


def test_a_switch_of_the_mode_reaches_all_traffic_within_3_s_and_loses_nothing(subject, forward) -> None:
    subject.wait_mode("Split", 180)
    load = Load(Chat(forward.url, subject.model), workers=4, max_tokens=8, sentences=1)
    late: dict[str, list[float]] = {}
    try:
        for mode in ("Colocated", "Split", "Colocated", "Split"):
            answered = len(load.answers)
            wait_for("traffic", lambda n=answered: len(load.answers) >= n + 8 or load.failures, 120)
            subject.apply(mode=mode)
            changed_s = time.monotonic()
            subject.wait_mode(mode, 60)
            answered = len(load.answers)
            wait_for("traffic since", lambda n=answered: len(load.answers) >= n + 8 or load.failures, 120)
            sent = [answer for answer in list(load.answers) if answer.sent_at_s > changed_s]
            assert any(answer.mode == mode for answer in sent)
            late[mode] = [a.sent_at_s - changed_s for a in sent if a.mode != mode]
    finally:
        load.stop()
        subject.apply()
    assert load.failures == []
    assert all(answer.finish_reason for answer in load.answers)
    # Counted from the user's change, the decision included.
    assert max((seconds for mode in late for seconds in late[mode]), default=0.0) <= 3.0, late


def test_a_killed_decode_pod_leaves_no_gap_in_the_stream(subject, forward) -> None:
    steps.kill_decode(subject, forward)


def test_without_fallback_a_slow_link_is_an_error_that_names_it(subject, forward) -> None:
    testbed, chat = subject.target.testbed, Chat(forward.url, subject.model)
    subject.apply(fallback="Never")
    try:
        subject.wait_mode("Split", 180)
        for node in testbed.spec.nodes:
            testbed.shape(node.name, "15mbit")

        def refused() -> str | None:
            try:
                chat.ask("short", SHORT_QUESTION, 4)
            except openai.InternalServerError as error:
                assert error.status_code == 503
                return str(error)
            return None

        assert "LinkDegraded" in wait_for("a refusal", refused, 90)
        assert subject.status()["mode"] != "Colocated"
        for node in testbed.spec.nodes:
            testbed.shape(node.name, None)
        wait_for("an answer once the link is well", lambda: refused() is None, 180)
    finally:
        for node in testbed.spec.nodes:
            testbed.shape(node.name, None)
        subject.apply()


def test_a_sample_of_the_soak_run(subject, forward, tmp_path: Path) -> None:
    subject.wait_ready(300)
    progress = Progress(seed=int(time.time()))
    try:
        run(subject, forward, progress, 60, tmp_path / "soak.json")
    finally:
        for node in subject.target.testbed.spec.nodes:
            subject.target.testbed.shape(node.name, None)
        subject.apply()
    assert not progress.failed, f"seed {progress.seed}"
    assert not progress.wrong, f"seed {progress.seed}"
    assert progress.answered > 0


def test_the_command_line_shows_the_object(subject) -> None:
    assert subject.name in subject.phasesplit("status", subject.name, "-n", subject.namespace)
    assert "Why this mode" in subject.phasesplit("explain", subject.name, "-n", subject.namespace)
    assert subject.name in subject.phasesplit("status", "-A")


def test_an_unknown_object_is_one_sentence(subject) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phasesplit.cli.main", "status", "no-such-object"],
        capture_output=True, text=True, timeout=60, check=False,
        env={"KUBECONFIG": str(subject.kubectl.kubeconfig), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "not found" in done.stderr
    assert "Traceback" not in done.stderr

"""The main job, step by step.

Each step acts on the real cluster, raises `DemoError` when what was promised did not happen, and
returns the facts to show. The end-to-end tests run these same steps.
"""

import concurrent.futures
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import openai

from demo.chat import SHORT_QUESTION, Answer, Chat, long_document, reference_answer
from demo.subject import Subject
from demo.target import DemoError, PortForward, wait_for

_CLIENTS_PER_STEP = 2
SUMMARISE = "Summarise this text in one sentence. "


@dataclass
class Facts:
    """What one step showed: rows of fact and value, and the measured numbers behind them."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    def add(self, name: str, value: object) -> None:
        self.rows.append((name, str(value)))


def converse(subject: Subject, forward: PortForward) -> Facts:
    """A short question, a long document, both at once: all split over two pods."""
    chat = Chat(forward.url, subject.model)
    facts = Facts()
    facts.answers.append(chat.ask("short question", SHORT_QUESTION, max_tokens=24))
    document = SUMMARISE + long_document()
    facts.answers.append(chat.ask("1,000-token document", document, max_tokens=32))
    # Another document, so that the prefix cache cannot answer for the prefill worker.
    other = SUMMARISE + long_document().replace("town", "city")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(chat.ask, "both: document", other, 32),
            pool.submit(chat.ask, "both: question", "Name three colours.", 24),
        ]
        facts.answers += [future.result(300) for future in both]
    for answer in facts.answers:
        trace = subject.inspect(answer.request_id)
        facts.add(answer.label, _trace_line(answer, trace))
        if not answer.text.strip():
            raise DemoError(f"{answer.label}: the answer is empty")
    document_trace = subject.inspect(facts.answers[1].request_id)
    prefill, decode = document_trace.get("prefill"), document_trace.get("decode")
    if not prefill or not decode or prefill["pod"] == decode["pod"]:
        raise DemoError("the document was not prefilled on one pod and decoded on another")
    facts.numbers["kv_bytes"] = decode["kv_bytes"]
    return facts


def _trace_line(answer: Answer, trace: dict[str, Any]) -> str:
    prefill, decode = trace.get("prefill"), trace.get("decode") or {}
    where = f"{decode.get('pod')}@{decode.get('node')}"
    if prefill:
        where = f"{prefill['pod']}@{prefill['node']} → {where}"
    parts = [where, f"{answer.prompt_tokens}+{answer.completion_tokens} tokens"]
    if decode.get("kv_bytes"):
        transfer_s = decode["kv_transfer_s"] or 0.0
        busy_s = decode["kv_busy_s"] or transfer_s
        rate = decode["kv_bytes"] / busy_s / 1e6 if busy_s else 0.0
        parts.append(
            f"KV {decode['kv_bytes'] / 1e6:.1f} MB in {transfer_s * 1e3:.0f} ms, {rate:.0f} MB/s busy"
        )
    for name, key in (("TTFT", "ttft_s"), ("2nd token", "second_token_gap_s"), ("TPOT", "tpot_s")):
        if trace.get(key) is not None:
            parts.append(f"{name} {trace[key] * 1e3:.0f} ms")
    return ", ".join(parts)


def compare(subject: Subject, asked: Answer, question: str, max_tokens: int) -> Facts:
    """One served answer against plain transformers on the same weights."""
    facts = Facts()
    trace = subject.inspect(asked.request_id)
    facts.add("request", asked.request_id)
    facts.add("route", _trace_line(asked, trace))
    facts.add("served", asked.text)
    if subject.target.model_path is None:
        facts.add("transformers", "not compared: the weights are not on this host")
        return facts
    reference = reference_answer(str(subject.target.model_path), question, max_tokens)
    facts.add("transformers", reference)
    if asked.text != reference:
        raise DemoError(f"the served text differs from plain transformers: {asked.text!r} != {reference!r}")
    facts.add("equal", "yes")
    return facts


class Load:
    """Steady background requests, and what became of each."""

    def __init__(self, chat: Chat, workers: int, max_tokens: int = 16, sentences: int = 4) -> None:
        self._chat, self._max_tokens, self._sentences = chat, max_tokens, sentences
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        self._stop = False
        self.answers: list[Answer] = []
        self.refused = 0
        self.failures: list[str] = []
        self._futures = [self._pool.submit(self._run, index) for index in range(workers)]

    def _run(self, index: int) -> None:
        number = 0
        while not self._stop:
            number += 1
            text = long_document(self._sentences).replace("town", f"town number {index}-{number}")
            try:
                self.answers.append(
                    self._chat.ask(f"load {index}-{number}", SUMMARISE + text, self._max_tokens)
                )
            except openai.RateLimitError:
                self.refused += 1
                time.sleep(0.5)
            except (openai.OpenAIError, OSError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.5)

    def stop(self) -> None:
        """No new requests; wait for those under way."""
        self._stop = True
        concurrent.futures.wait(self._futures, timeout=300)
        self._pool.shutdown(wait=False)

    def modes(self) -> dict[str, int]:
        """Answers by the mode that served them."""
        counts: dict[str, int] = {}
        for answer in list(self.answers):
            counts[answer.mode] = counts.get(answer.mode, 0) + 1
        return counts


def overload(subject: Subject, forward: PortForward, timeout_s: float = 240) -> Facts:
    """More and more load until a target is missed; the operator decides and acts."""
    facts = Facts()
    chat = Chat(forward.url, subject.model)
    before, known = _arrangement(subject), _decisions(subject)
    loads: list[Load] = []
    started = time.monotonic()
    try:
        while not (new := {key: text for key, text in _decisions(subject).items() if key not in known}):
            if time.monotonic() - started > timeout_s:
                raise DemoError(
                    f"no scaling decision within {timeout_s:.0f} s of rising load: {subject.status()}"
                )
            if len(loads) < 5:
                loads.append(Load(chat, workers=_CLIENTS_PER_STEP, max_tokens=24, sentences=12))
            time.sleep(10)
        after = wait_for("the decision carried out", lambda: _changed(subject, before), 60)
    finally:
        for load in loads:
            load.stop()
    facts.add(
        "load", f"{_CLIENTS_PER_STEP * len(loads)} clients at once after {time.monotonic() - started:.0f} s"
    )
    for item in subject.status().get("slo", []):
        facts.add(f"class {item['name']}", f"{item.get('attainmentPercent', '-')} % attained")
    for decision in new.values():
        facts.add("decision", decision)
    facts.add("carried out", f"{before} → {after}")
    answered = sum(len(load.answers) for load in loads)
    refused = sum(load.refused for load in loads)
    failures = [failure for load in loads for failure in load.failures]
    facts.add("requests", f"{answered} answered, {refused} told to come back (429), {len(failures)} failed")
    if failures:
        raise DemoError(f"{len(failures)} requests failed under load, the first with {failures[0]}")
    return facts


def _decisions(subject: Subject) -> dict[tuple[str, str], str]:
    """Events of the operator that add a worker or switch a role, each time they were seen."""
    return {
        (
            event["metadata"]["uid"],
            event["metadata"]["resourceVersion"],
        ): f"{event['reason']}: {event['message']}"
        for event in subject.events()
        if event["reason"] in {"LoadUp", "QueueWait", "RoleSwitch"}
    }


def _changed(subject: Subject, before: str) -> str | None:
    now = _arrangement(subject)
    return now if now != before else None


def _arrangement(subject: Subject) -> str:
    """Replicas of both pools and the roles of their pods, as the routing table has them."""
    pools = {pool["name"]: pool["desired"] for pool in subject.status().get("pools", [])}
    table = subject.kubectl.get("configmap", f"{subject.name}-routing", "-n", subject.namespace)
    roles = json.loads(table["data"]["routing.json"]).get("roles", {})
    return f"replicas {pools}, roles {dict(sorted(roles.items()))}"


def degrade_link(subject: Subject, forward: PortForward) -> Facts:
    """Shape a node's link below need: colocated within 15 s, nothing lost; and back when it is restored."""
    testbed = subject.target.testbed
    if testbed is None:
        raise DemoError("links of a cluster of yours are left alone; this step runs on the testbed only")
    facts = Facts()
    subject.wait_mode("Split", 120)
    decode_pod = next(p for p in subject.pods("worker") if "-decode-" in p["metadata"]["name"])
    node = decode_pod["spec"]["nodeName"]
    load = Load(Chat(forward.url, subject.model), workers=2)
    try:
        wait_for("first answers", lambda: len(load.answers) >= 2 or load.failures, 120)
        rate = _too_slow(subject)
        testbed.shape(node, rate)
        seconds, decision = subject.wait_mode("Colocated", 60)
        facts.add(f"{node} at {rate}", f"Colocated after {seconds:.1f} s")
        facts.add("reason", f"{decision['reason']}: {decision['message']}")
        served = len(load.answers)
        wait_for("answers while colocated", lambda: len(load.answers) >= served + 2 or load.failures, 120)
        testbed.shape(node, None)
        back_s, decision = subject.wait_mode("Split", 180)
        facts.add("link restored", f"Split after {back_s:.1f} s: {decision['message']}")
        served = len(load.answers)
        wait_for("answers after the return", lambda: len(load.answers) >= served + 2 or load.failures, 120)
    finally:
        testbed.shape(node, None)
        load.stop()
    facts.add("requests", f"{len(load.answers)} answered, {load.modes()}, {len(load.failures)} failed")
    facts.numbers |= {"to_colocated_s": seconds, "to_split_s": back_s}
    if load.failures:
        raise DemoError(f"{len(load.failures)} requests failed, the first with {load.failures[0]}")
    if not facts.rows[1][1].startswith("LinkDegraded"):
        raise DemoError(f"colocated for another reason: {facts.rows[1][1]}")
    if seconds > 15:
        raise DemoError(f"the object was colocated after {seconds:.1f} s, more than 15 s")
    return facts


def _too_slow(subject: Subject) -> str:
    """50 Mbit/s, or less than half of the need where busy processors make the split need less."""
    need = subject.status().get("evidence", {}).get("linkNeedBytesPerSecond")
    return f"{min(50.0, need * 8 / 1e6 / 2.5 if need else 50.0):.0f}mbit"


def kill_decode(subject: Subject, forward: PortForward) -> Facts:
    """Kill a decode pod in the middle of a stream: no gap, no repeat."""
    facts = Facts()
    subject.wait_mode("Split", 180)
    question, max_tokens = "Tell me a short story about a lighthouse.", 96
    chat = Chat(forward.url, subject.model)
    expected = chat.ask("undisturbed", question, max_tokens)
    disturbed = Answer("disturbed")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(chat.ask_into, disturbed, question, max_tokens)
        wait_for(
            "a third of the stream",
            lambda: disturbed.num_chunks > expected.num_chunks // 3 or stream.done(),
            120,
            interval_s=0.05,
        )
        victim = disturbed.pair.split(",")[-1]
        subject.kubectl(
            "delete", "pod", victim, "-n", subject.namespace, "--grace-period=0", "--force", "--wait=false"
        )
        facts.add("killed", victim)
        stream.result(300)
    trace = subject.inspect(disturbed.request_id)
    gaps = [b - a for a, b in zip(disturbed.chunk_times_s, disturbed.chunk_times_s[1:], strict=False)]
    facts.add(
        "longest wait in the stream", f"{max(gaps, default=0):.1f} s (median {statistics.median(gaps):.2f} s)"
    )
    facts.add("migrations", trace["num_migrations"])
    facts.add("same text", "yes" if disturbed.text == expected.text else "NO")
    facts.numbers |= {"longest_gap_s": max(gaps, default=0.0), "migrations": trace["num_migrations"]}
    if disturbed.text != expected.text:
        raise DemoError(f"the stream has a gap or a repeat: {disturbed.text!r} != {expected.text!r}")
    if disturbed.finish_reason is None:
        raise DemoError("the stream ended without a finish reason")
    if not trace["num_migrations"]:
        raise DemoError(f"the pod {victim} was killed, but the stream did not run there")
    return facts

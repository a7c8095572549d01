"""`make demo` and `make demo-down`: the main job on a real cluster, with no hand on it."""

import os
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from demo import steps
from demo.chat import SHORT_QUESTION
from demo.subject import Subject
from demo.target import DemoError, PortForward, Target, choose_target
from testbed import cluster
from testbed.errors import TestbedError
from testbed.locks import exclusive
from testbed.paths import cache_dir

console = Console()


def main() -> int:
    started = time.monotonic()
    try:
        if sys.argv[1:] == ["down"]:
            _down()
        else:
            # Tests on the same testbed would shape its links and install over the demo.
            lock = cache_dir() / "testbed" / "tests.lock"
            with exclusive(lock, 600, "the testbed, used by a test run,"):
                _show(started)
    except (DemoError, TestbedError) as error:
        console.print(f"[red]stopped:[/red] {error}", highlight=False)
        return 1
    return 0


def _show(started: float) -> None:
    summary: list[tuple[str, float, str]] = []

    def step(
        title: str, run: Callable[[], steps.Facts], headline: Callable[[steps.Facts], str]
    ) -> steps.Facts:
        console.print(f"\n[bold cyan]{title}[/bold cyan]")
        begun = time.monotonic()
        with console.status(title):
            facts = run()
        for name, value in facts.rows:
            console.print(f"  [bold]{name}[/bold]  {value}", highlight=False)
        summary.append((title, time.monotonic() - begun, headline(facts)))
        return facts

    target = choose_target(
        lambda text: console.print(f"[{time.monotonic() - started:5.0f} s] {text}", highlight=False)
    )
    subject = Subject(target)
    step("1  Install and serve", lambda: _install(target, subject), lambda facts: facts.rows[-1][1])
    with PortForward(target.kubectl, subject.namespace, f"{subject.name}-router", 80) as forward:
        talk = step(
            "2  Chat in two phases", lambda: steps.converse(subject, forward),
            lambda facts: f"{facts.numbers['kv_bytes'] / 1e6:.0f} MB of KV carried for the document",
        )  # fmt: skip
        step(
            "3  Same tokens as plain transformers",
            lambda: steps.compare(subject, talk.answers[0], SHORT_QUESTION, 24),
            lambda facts: facts.rows[-1][1],
        )  # fmt: skip
        step("4  Load until a target is missed", lambda: steps.overload(subject, forward), _decision)
        if target.testbed is not None:
            step(
                "5  A slow link", lambda: steps.degrade_link(subject, forward), lambda facts: facts.rows[0][1]
            )
        step(
            "6  A dead decode pod",
            lambda: steps.kill_decode(subject, forward),
            lambda facts: "no gap, no repeat",
        )
    _summarise(summary, time.monotonic() - started, target, subject)


def _install(target: Target, subject: Subject) -> steps.Facts:
    facts = steps.Facts()
    begun = time.monotonic()
    target.helm_install()
    facts.add("helm install", f"{time.monotonic() - begun:.0f} s")
    subject.apply()
    facts.add("Ready", f"{subject.wait_ready(600):.0f} s after kubectl apply")
    _, decision = subject.wait_mode("Split", 120)
    facts.add("mode", f"Split ({decision['reason']}: {decision['message']})")
    for pod in subject.pods():
        facts.add(pod["metadata"]["name"], pod["spec"].get("nodeName", "?"))
    facts.add("serving", f"{time.monotonic() - begun:.0f} s after the nodes were up")
    return facts


def _decision(facts: steps.Facts) -> str:
    return dict(facts.rows)["decision"]


def _summarise(
    summary: list[tuple[str, float, str]], total_s: float, target: Target, subject: Subject
) -> None:
    table = Table("step", "seconds", "shown", title=f"done in {total_s:.0f} s")
    for title, seconds, headline in summary:
        table.add_row(title, f"{seconds:.0f}", headline)
    console.print(table)
    kubeconfig = f"export KUBECONFIG={target.kubectl.kubeconfig}\n" if target.kubectl.kubeconfig else ""
    if target.testbed is not None:
        kubeconfig = f"export KUBECONFIG={target.testbed.kubeconfig}\n"
    console.print(
        Panel(
            f"{kubeconfig}"
            f".venv/bin/phasesplit status {subject.name}\n"
            f".venv/bin/phasesplit explain {subject.name}\n"
            f".venv/bin/phasesplit kv inspect {subject.name} last\n"
            "make demo-down",
            title="the cluster is up; try",
            highlight=False,
        )
    )


def _down() -> None:
    if os.environ.get("CONTEXT"):
        target = choose_target(console.print)
        Subject(target).delete()
        target.helm_uninstall()
        console.print("the object and the chart are removed")
        return
    cluster.down()
    console.print("the testbed is down")


if __name__ == "__main__":
    sys.exit(main())

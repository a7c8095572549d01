"""`make soak`: steady load, a random fault every half minute, every answer checked. Resumable.

The state file holds the seed, the round and the counts; a second run with the same file goes on where the
first one stopped. Prints one line per round and a JSON line at the end.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import openai

from demo.chat import Chat
from demo.subject import Subject
from demo.target import DemoError, PortForward, choose_target
from soak.faults import FAULTS
from testbed.paths import cache_dir

PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "Tell me a short story about a lighthouse.",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about rain.",
)
MAX_TOKENS = 40
SETTLE_S = 180.0


@dataclass
class Progress:
    """What has been done so far; written after every round."""

    seed: int = 1
    rounds: int = 0
    answered: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Steady load under random faults, resumable.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=cache_dir() / "soak.json")
    options = parser.parse_args(arguments)
    progress = Progress(seed=options.seed)
    if options.state.exists():
        progress = Progress(**json.loads(options.state.read_text()))
        print(f"going on after round {progress.rounds} of {options.state}")
    target = choose_target(print)
    subject = Subject(target)
    try:
        target.helm_install()
        subject.apply()
        subject.wait_ready(600)
        with PortForward(target.kubectl, subject.namespace, f"{subject.name}-router", 80) as forward:
            run(subject, forward, progress, options.minutes * 60, options.state)
    except DemoError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"soak": asdict(progress)}))
    return 1 if progress.failed or progress.wrong else 0


def run(subject: Subject, forward: PortForward, progress: Progress, seconds: float, state: Path) -> None:
    """Rounds of one fault and several checked answers until the time is over."""
    chat = Chat(forward.url, subject.model)
    for prompt in PROMPTS:
        if prompt not in progress.expected:
            progress.expected[prompt] = chat.ask("undisturbed", prompt, MAX_TOKENS).text
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        progress.rounds += 1
        chance = random.Random(f"{progress.seed}-{progress.rounds}")
        name = chance.choice(sorted(FAULTS))
        did = FAULTS[name](subject, chance)
        began = time.monotonic()
        for _ in range(chance.randint(2, 5)):
            forward.ensure()
            _ask(chat, chance.choice(PROMPTS), progress)
        # Every fault must end in a serving object; a link left slow serves colocated.
        subject.wait_ready(SETTLE_S)
        progress.recovery_s.append(round(time.monotonic() - began, 1))
        state.write_text(json.dumps(asdict(progress)))
        print(
            f"round {progress.rounds}: {did}; {progress.answered} answered, {len(progress.failed)} failed, "
            f"{len(progress.wrong)} wrong, mode {subject.status().get('mode')}",
            flush=True,
        )


def _ask(chat: Chat, prompt: str, progress: Progress) -> None:
    try:
        answer = chat.ask("soak", prompt, MAX_TOKENS)
    except openai.RateLimitError:
        progress.refused += 1
        return
    except openai.OpenAIError as error:
        progress.failed.append(f"round {progress.rounds}: {type(error).__name__}: {error}")
        return
    progress.answered += 1
    if answer.text != progress.expected[prompt]:
        progress.wrong.append(f"round {progress.rounds}, {prompt}: {answer.text!r}")


if __name__ == "__main__":
    sys.exit(main())

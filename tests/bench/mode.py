"""The choice of mode against an oracle that knows the true profile and link and the next window.

The decision sees the last window and a fit that is 10 % off, a link that is 20 % off. Right means the
architecture that keeps more requests in target in the next window, judged where the two differ by
over 5 %. Regret is what is lost of the better one's requests in target, over all scenarios.

Scenarios differ in hardware (prefill and decode of a step add, or hide behind each other), load, lengths,
targets, links, prefix reuse, GPU counts and arrivals (Poisson, bursty, drifting); most lie near the border.
Each verdict is kept in a state file as it is found: an interrupted run goes on where it stopped, and a
change of the planner begins anew. `--table FILE` writes the result as Markdown.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "tests")]

import helpers_scenarios  # noqa: E402
import helpers_traces  # noqa: E402
from helpers_scenarios import Scenario, random_scenario  # noqa: E402
from phasesplit.api.routing import LatencyClass  # noqa: E402
from phasesplit.planner.demand import Hardware, build_demands  # noqa: E402
from phasesplit.planner.evidence import compare  # noqa: E402
from phasesplit.planner.facts import LoadFacts  # noqa: E402
from phasesplit.planner.replay import ReplayInput, ReplayOutcome, replay  # noqa: E402
from phasesplit.planner.simulation_types import Arrival  # noqa: E402

MINIMUM_GAIN_PERCENT = 5.0
RULE = "replay"  # the product's own
STATE = Path(os.environ.get("PHASESPLIT_CACHE", Path.home() / ".cache/phasesplit")) / "bench"


@dataclass(frozen=True)
class Verdict:
    """One scenario: what it was, what each way kept in target, and what each rule chose."""

    seed: int
    workers: int
    overlap: float
    load: float
    near: bool
    gap_variation: float
    drift: float
    cached_share: float
    split: float  # requests in target per second, in the next window
    colocated: float
    chosen: dict[str, bool]  # by rule: split?
    why: str = ""  # of a miss of the product's rule

    @property
    def differs(self) -> float:
        """By how much the better way is better."""
        least = min(self.split, self.colocated)
        return abs(self.split - self.colocated) / least if least > 0 else float(self.split != self.colocated)

    @property
    def matters(self) -> bool:
        return self.differs > 0.05

    def right(self, rule: str) -> bool:
        return self.chosen[rule] == (self.split > self.colocated)

    def regret(self, rule: str) -> float:
        best = max(self.split, self.colocated)
        got = self.split if self.chosen[rule] else self.colocated
        return (best - got) / best if best > 0 else 0.0


def replay_of(scenario: Scenario, trace: tuple[Arrival, ...], hardware: Hardware) -> ReplayOutcome:
    found = replay(
        ReplayInput(trace=trace, hardware=hardware, classes=scenario.classes, workers=scenario.workers)
    )
    if found is None:
        raise ValueError(f"scenario {scenario.seed} is empty")
    return found


def closed_form_chooses_split(scenario: Scenario) -> bool:
    window = scenario.last_window
    duration_s = window[-1].at_s - window[0].at_s
    prompts = sorted(arrival.prompt_tokens for arrival in window)
    load = LoadFacts(
        arrival_rate_per_s=len(window) / duration_s,
        mean_prompt_tokens=mean(prompts),
        p95_prompt_tokens=prompts[int(0.95 * len(prompts))],
        mean_output_tokens=mean(arrival.output_tokens for arrival in window),
        mean_cached_tokens=mean(arrival.cached_tokens for arrival in window),
        finished=len(window),
    )
    target = scenario.classes[0]
    classes = [
        LatencyClass(
            name="default", ttft_s=target.ttft_s, tpot_s=target.tpot_s, percentile=100 * target.share
        )
    ]
    found = compare(build_demands([load], classes), scenario.seen_hardware, scenario.workers)
    return found.gain_percent >= MINIMUM_GAIN_PERCENT and not found.colocated.meets


def judge(scenario: Scenario) -> Verdict:
    truth = replay_of(scenario, scenario.next_window, scenario.hardware)
    seen = replay_of(scenario, scenario.last_window, scenario.seen_hardware)
    verdict = Verdict(
        seed=scenario.seed,
        workers=scenario.workers,
        overlap=scenario.hardware.decode_profile.overlap,
        load=round(scenario.load, 3),
        near=scenario.near,
        gap_variation=scenario.gap_variation,
        drift=round(scenario.drift, 3),
        cached_share=scenario.cached_share,
        split=truth.split.attained_per_s,
        colocated=truth.colocated.attained_per_s,
        chosen={
            RULE: seen.gain_low_percent >= MINIMUM_GAIN_PERCENT,
            "replay without interval": seen.gain_percent >= MINIMUM_GAIN_PERCENT,
            "closed form": closed_form_chooses_split(scenario),
            "always colocated": False,
            "always split": True,
        },
    )
    if not verdict.matters or verdict.right(RULE):
        return verdict
    return Verdict(**{**asdict(verdict), "why": explain(scenario, verdict, seen)})


def explain(scenario: Scenario, verdict: Verdict, seen: ReplayOutcome) -> str:
    """What alone would have to be otherwise for the rule to be right, asked from the mildest on."""
    split_is_better = verdict.split > verdict.colocated
    if split_is_better and seen.gain_percent >= MINIMUM_GAIN_PERCENT:
        return f"caution: gain {seen.gain_percent:.0f} % seen, its lower bound {seen.gain_low_percent:.0f} %"
    if split_is_better and seen.gain_percent > 0:
        return (
            f"caution: gain {seen.gain_percent:.1f} % seen, below the minimum of {MINIMUM_GAIN_PERCENT:.0f} %"
        )

    def right_with(trace: tuple[Arrival, ...], hardware: Hardware) -> bool:
        found = replay_of(scenario, trace, hardware)
        return (found.gain_percent > 0) == split_is_better

    if right_with(scenario.last_window, scenario.hardware):
        return "the fit: with the true profile and link the last window says the right thing"
    if right_with(scenario.next_window, scenario.seen_hardware):
        return "the arrivals: the last window favours the other way even with the true hardware"
    return "both: neither the true hardware nor the next window alone sets it right"


def read_verdicts(state: Path) -> dict[int, Verdict | None]:
    """By seed; None where the seed makes no scenario."""
    if not state.exists():
        return {}
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    return {row["seed"]: Verdict(**row) if "split" in row else None for row in rows}


def verdicts_of(count: int, requests: int, first_seed: int, state: Path) -> list[Verdict]:
    """`count` verdicts, known ones first from the state file."""
    known = read_verdicts(state)
    state.parent.mkdir(parents=True, exist_ok=True)
    found: list[Verdict] = []
    seed = first_seed
    while len(found) < count:
        if seed not in known:
            scenario = random_scenario(seed, requests=requests)
            known[seed] = judge(scenario) if scenario is not None else None
            row = asdict(known[seed]) if known[seed] is not None else {"seed": seed}
            with state.open("a") as out:
                out.write(json.dumps(row) + "\n")
        verdict = known[seed]
        if verdict is not None:
            found.append(verdict)
            print(f"\r{len(found)} of {count}", end="", file=sys.stderr, flush=True)
        seed += 1
    print(file=sys.stderr)
    return found


def fingerprint() -> str:
    """Of everything that a verdict depends on: the planner as far as it is loaded, and the scenarios."""
    files = [
        module.__file__ for name, module in sys.modules.items() if name.startswith("phasesplit.planner.")
    ]
    files += [helpers_scenarios.__file__, helpers_traces.__file__, __file__]
    digest = hashlib.sha256()
    for name in sorted(name for name in files if name):
        digest.update(Path(name).read_bytes())
    return digest.hexdigest()[:12]


GROUPS: dict[str, Callable[[Verdict], bool]] = {
    "all": lambda _: True,
    "near the border": lambda v: v.near,
    "additive step": lambda v: v.overlap == 0,
    "overlapped step": lambda v: v.overlap > 0,
    "Poisson arrivals": lambda v: v.gap_variation == 1,
    "bursty arrivals": lambda v: v.gap_variation > 1,
    "drifting load": lambda v: v.drift != 1,
    "prefix reuse": lambda v: v.cached_share > 0,
    "two workers": lambda v: v.workers == 2,
    "beyond capacity": lambda v: v.load > 1,
}


def scores(verdicts: Sequence[Verdict], rule: str) -> tuple[float, float, int]:
    """Share right where it matters and mean regret, both in percent, and how many matter."""
    matter = [verdict for verdict in verdicts if verdict.matters]
    right = 100 * mean(verdict.right(rule) for verdict in matter) if matter else 100.0
    return right, 100 * mean(verdict.regret(rule) for verdict in verdicts), len(matter)


def table_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The result as Markdown: by rule, by kind of scenario, and every miss."""
    yield "| rule | right | mean regret |"
    yield "|---|---|---|"
    for rule in verdicts[0].chosen:
        right, regret, count = scores(verdicts, rule)
        yield f"| {rule} | {right:.1f} % of {count} | {regret:.2f} % |"
    yield ""
    yield "| scenarios | how many | differ by over 5 % | right | mean regret |"
    yield "|---|---|---|---|---|"
    for name, belongs in GROUPS.items():
        group = [verdict for verdict in verdicts if belongs(verdict)]
        if group:
            right, regret, count = scores(group, RULE)
            yield f"| {name} | {len(group)} | {count} | {right:.1f} % | {regret:.2f} % |"
    yield ""
    yield "| seed | workers | load | split in target/s | colocated in target/s | lost | why |"
    yield "|---|---|---|---|---|---|---|"
    for v in verdicts:
        if v.matters and not v.right(RULE):
            rates = f"{v.split:.3g} | {v.colocated:.3g}"
            lost = f"{100 * v.regret(RULE):.1f} %"
            yield f"| {v.seed} | {v.workers} | {v.load:.2f} | {rates} | {lost} | {v.why} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=500)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="also write the tables there")
    options = parser.parse_args()
    state = STATE / f"mode-{fingerprint()}-{options.requests}.jsonl"
    verdicts = verdicts_of(options.scenarios, options.requests, options.first_seed, state)
    lines = list(table_lines(verdicts))
    print("\n".join(lines))
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")
    results: list[dict[str, object]] = []
    for rule in verdicts[0].chosen:
        right, regret, _ = scores(verdicts, rule)
        results += [
            {"name": f"{rule}: right", "value": right, "unit": "%", "bar": 95, "holds": right >= 95},
            {"name": f"{rule}: regret", "value": regret, "unit": "%", "bar": 1.5, "holds": regret <= 1.5},
        ]
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
    ).stdout.strip()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"bench": "mode", "commit": commit, "machine": machine, "results": results}))


if __name__ == "__main__":
    main()

"""The choice of mode against an oracle that knows the true profile and link and the next window.

The decision sees the last window and a fit that is 10 % off, a link that is 20 % off. Right means the
architecture that keeps more requests in target in the next window, judged where the two differ by
over 5 %. Regret is what is lost of the better one's requests in target, over all scenarios.
"""

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "tests")]

from helpers_scenarios import Scenario, random_scenario  # noqa: E402
from phasesplit.api.routing import LatencyClass  # noqa: E402
from phasesplit.planner.demand import build_demands  # noqa: E402
from phasesplit.planner.evidence import compare  # noqa: E402
from phasesplit.planner.facts import LoadFacts  # noqa: E402
from phasesplit.planner.replay import ReplayInput, ReplayOutcome, replay  # noqa: E402

MINIMUM_GAIN_PERCENT = 5.0


@dataclass(frozen=True)
class Verdict:
    """One scenario: what each way kept in target, and what each rule chose."""

    seed: int
    split: float  # requests in target per second, in the next window
    colocated: float
    chosen: dict[str, bool]  # by rule: split?

    @property
    def matters(self) -> bool:
        return abs(self.split - self.colocated) > 0.05 * min(self.split, self.colocated)

    def right(self, rule: str) -> bool:
        return self.chosen[rule] == (self.split > self.colocated)

    def regret(self, rule: str) -> float:
        best = max(self.split, self.colocated)
        got = self.split if self.chosen[rule] else self.colocated
        return (best - got) / best if best > 0 else 0.0


def replay_of(scenario: Scenario, *, oracle: bool) -> ReplayOutcome:
    found = replay(
        ReplayInput(
            trace=scenario.next_window if oracle else scenario.last_window,
            hardware=scenario.hardware if oracle else scenario.seen_hardware,
            classes=scenario.classes,
            workers=scenario.workers,
        )
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
    truth, seen = replay_of(scenario, oracle=True), replay_of(scenario, oracle=False)
    return Verdict(
        scenario.seed,
        truth.split.attained_per_s,
        truth.colocated.attained_per_s,
        {
            "replay": seen.gain_low_percent >= MINIMUM_GAIN_PERCENT,
            "replay without interval": seen.gain_percent >= MINIMUM_GAIN_PERCENT,
            "closed form": closed_form_chooses_split(scenario),
            "always colocated": False,
            "always split": True,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=500)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    verdicts: list[Verdict] = []
    seed = options.first_seed
    while len(verdicts) < options.scenarios:
        scenario = random_scenario(seed, requests=options.requests)
        seed += 1
        if scenario is not None:
            verdicts.append(judge(scenario))
            print(f"\r{len(verdicts)} of {options.scenarios}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    matter = [verdict for verdict in verdicts if verdict.matters]
    results: list[dict[str, object]] = []
    for rule in verdicts[0].chosen:
        right = 100 * mean(verdict.right(rule) for verdict in matter) if matter else 100.0
        regret = 100 * mean(verdict.regret(rule) for verdict in verdicts)
        print(f"{rule}: {right:.1f} % right of {len(matter)}, mean regret {regret:.2f} %")
        results += [
            {"name": f"{rule}: right", "value": right, "unit": "%", "bar": 95, "holds": right >= 95},
            {"name": f"{rule}: regret", "value": regret, "unit": "%", "bar": 1.5, "holds": regret <= 1.5},
        ]
    for verdict in matter:
        if not verdict.right("replay"):
            rates = f"split {verdict.split:.3g}/s, colocated {verdict.colocated:.3g}/s in target"
            print(f"missed by replay: seed {verdict.seed}, {rates}")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
    ).stdout.strip()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"bench": "mode", "commit": commit, "machine": machine, "results": results}))


if __name__ == "__main__":
    main()

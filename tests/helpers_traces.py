"""Random traces: Poisson or gamma arrivals, log-normal prompts, geometric answers; reproducible by seed."""

import math
import random

from phasesplit.planner.simulation_types import Arrival


def random_trace(
    seed: int,
    rate_per_s: float,
    count: int,
    prompt_tokens: float,
    output_tokens: float,
    *,
    prompt_variation: float = 0.5,
    cached_share: float = 0.0,
    num_classes: int = 1,
    gap_variation: float = 1.0,
) -> list[Arrival]:
    """`count` requests. Variations are squared coefficients; gaps of variation 1 are Poisson arrivals."""
    rng = random.Random(seed)
    sigma = math.sqrt(math.log(1 + prompt_variation))
    now, trace = 0.0, []
    for _ in range(count):
        if gap_variation == 1.0:
            now += rng.expovariate(rate_per_s)
        else:
            now += rng.gammavariate(1 / gap_variation, gap_variation / rate_per_s)
        prompt = max(1, round(prompt_tokens * math.exp(rng.gauss(-sigma * sigma / 2, sigma))))
        output = 1 + int(rng.expovariate(1 / max(1e-9, output_tokens - 1))) if output_tokens > 1 else 1
        cached = min(prompt - 1, int(prompt * cached_share))
        trace.append(Arrival(now, prompt, output, rng.randrange(num_classes), cached))
    return trace

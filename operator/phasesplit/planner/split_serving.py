"""What a number of prefill and decode workers would do, in closed form.

Prefill is a station of several servers; the decode batch follows from Little's law; the exposed part
of the transfer lies in the second-token gap and so in TPOT.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from phasesplit.planner.demand import ClassPrediction, Demand, Hardware, Prediction
from phasesplit.planner.facts import StepProfile
from phasesplit.planner.performance import exposed_transfer_s, num_chunks, prefill_chunk_tokens, prefill_s
from phasesplit.planner.queueing import waits
from phasesplit.planner.serving import (
    build_stream,
    mean_service_s,
    predict_decoding,
    prompt_lengths,
    ttft_share,
)


def predict_split(
    demands: Sequence[Demand], hardware: Hardware, prefill_workers: int, decode_workers: int
) -> Prediction:
    """What that many prefill and decode workers would do."""
    services = [_services(hardware.prefill_profile, demand) for demand in demands]
    streams = [build_stream(demand, found) for demand, found in zip(demands, services, strict=True)]
    queue = waits(streams, prefill_workers)
    decoding = predict_decoding(
        demands, hardware.decode_profile, decode_workers, hardware.kv_tokens_per_worker
    )
    free_link = _free_link_bytes_per_s(demands, hardware, decode_workers)
    found = []
    for demand, service, wait in zip(demands, services, queue, strict=True):
        mean_s = mean_service_s(service)
        chunk = prefill_chunk_tokens(hardware.prefill_profile, demand.prompt_tokens)
        exposed_s = exposed_transfer_s(
            demand.prompt_tokens * hardware.kv_bytes_per_token,
            free_link,
            prefill_seconds=mean_s,
            chunks=num_chunks(demand.new_tokens, chunk),
        )
        # The first token is out before the transfer ends: what is exposed lies in the second gap.
        per_token_s = exposed_s / demand.decode_steps if demand.decode_steps else 0.0
        ttft = ttft_share(demand, wait, service)
        tpot_share = decoding.share_within(demand.tpot_s - per_token_s) if demand.decode_steps else 1.0
        found.append(
            ClassPrediction(
                name=demand.name,
                ttft_s=wait.mean_s + mean_s,
                tpot_s=decoding.step_s + per_token_s,
                attainment=ttft * tpot_share,
                ttft_attainment=ttft,
                tpot_attainment=tpot_share,
                second_token_gap_s=exposed_s + decoding.step_s,
                meets=ttft * tpot_share >= demand.share,
            )
        )
    load = sum(stream.rate_per_s * stream.mean_s for stream in streams)
    return Prediction(
        classes=tuple(found),
        prefill_utilisation=load / prefill_workers if prefill_workers else (math.inf if load else 0.0),
        decode_utilisation=decoding.utilisation,
        batch=decoding.batch,
        meets=all(item.meets for item in found),
    )


def _services(profile: StepProfile, demand: Demand) -> tuple[tuple[float, float], ...]:
    """Seconds of prefill of the prompts that stand for the class."""
    return tuple((_service_s(profile, new, cached), weight) for new, cached, weight in prompt_lengths(demand))


@lru_cache(maxsize=4096)  # a service time depends on no load and no number of workers
def _service_s(profile: StepProfile, new_tokens: float, cached_tokens: float) -> float:
    tokens = new_tokens + cached_tokens
    chunk = prefill_chunk_tokens(profile, tokens)
    return prefill_s(profile, tokens, chunk, cached_tokens=cached_tokens)


def _free_link_bytes_per_s(demands: Sequence[Demand], hardware: Hardware, decode_workers: int) -> float:
    """Bandwidth a transfer finds on a decode worker's link that the others use too."""
    if math.isinf(hardware.link_bytes_per_s):
        return math.inf
    offered = sum(demand.rate_per_s * demand.prompt_tokens for demand in demands)
    used = offered * hardware.kv_bytes_per_token / max(1, decode_workers) / hardware.link_bytes_per_s
    return hardware.link_bytes_per_s * max(0.0, 1 - used)

"""Is the link fast enough for the split? Need against have, pair by pair of nodes.

Need: the KV that prefill makes per second, from the step profile; a link must carry it at 60 % of
its measured busy-time bandwidth. Knows nothing of how links were measured.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.planner.demand import is_positive, usable_profile
from phasesplit.planner.facts import LinkFacts, LoadFacts, StepProfile, WorkerFacts
from phasesplit.planner.mode_types import LinkVerdict, ModeInput, TransferWindow
from phasesplit.planner.performance import prefill_chunk_tokens, prefill_s
from phasesplit.planner.text import format_percent, format_rate

USABLE_SHARE = 0.6  # of the measured bandwidth
RETURN_MARGIN = 1.15  # a link found too slow must be this much better before it counts as good
MAX_AGE_S = 120.0  # older measurements say nothing
MAX_FAILURE_SHARE = 0.05
MIN_FAILURES = 3
_TYPICAL_PROMPT_TOKENS = 512.0


@dataclass(frozen=True, slots=True)
class LinkNeed:
    """What the split asks of links."""

    bytes_per_s_per_worker: float  # at the measured bandwidth, share included
    prompt_tokens_per_s: float | None  # None: the user's own bound
    kv_bytes_per_token: float
    summed: bool  # do several prefill workers on one node add up?


def link_need(
    loads: Sequence[LoadFacts],
    profile: StepProfile | None,
    kv_bytes_per_token: float | None,
    min_bandwidth_bytes_per_s: float | None,
) -> LinkNeed | None:
    """What one prefill worker asks of its link; None while nothing is known of it."""
    if min_bandwidth_bytes_per_s is not None:
        return LinkNeed(min_bandwidth_bytes_per_s, None, kv_bytes_per_token or 0.0, summed=False)
    profile = usable_profile(profile)
    if profile is None or not kv_bytes_per_token:
        return None
    flowing = [load for load in loads if is_positive(load.arrival_rate_per_s)]
    flowing = [load for load in flowing if is_positive(load.mean_prompt_tokens)]
    rate = sum(load.arrival_rate_per_s for load in flowing)
    prompt, cached = _TYPICAL_PROMPT_TOKENS, 0.0
    if rate > 0:
        prompt = sum(load.arrival_rate_per_s * load.mean_prompt_tokens for load in flowing) / rate
        cached = sum(
            load.arrival_rate_per_s * load.mean_cached_tokens
            for load in flowing
            if is_positive(load.mean_cached_tokens)
        )
        prompt, cached = max(1.0, prompt), min(cached / rate, prompt - 1)
    seconds = prefill_s(
        profile, prompt, prefill_chunk_tokens(profile, prompt), cached_tokens=max(0.0, cached)
    )
    if seconds <= 0:
        return None
    tokens_per_s = prompt / seconds
    return LinkNeed(
        tokens_per_s * kv_bytes_per_token / USABLE_SHARE, tokens_per_s, kv_bytes_per_token, summed=True
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    link: LinkFacts
    need_bytes_per_s: float
    weight: int  # pairs of workers behind it

    @property
    def ratio(self) -> float:
        return self.link.bytes_per_s / self.need_bytes_per_s if self.need_bytes_per_s > 0 else float("inf")


def judge_links(given: ModeInput) -> LinkVerdict:
    """The condition `LinkHealthy`: transfer failures first, then bandwidth."""
    failing = _judge_transfers(given.transfers)
    if failing is not None:
        return failing
    profile = given.profiles.get(Pool.PREFILL)
    need = link_need(given.loads, profile, given.kv_bytes_per_token, given.min_bandwidth_bytes_per_s)
    prefill, decode = _workers_by_node(given.workers)
    wanted = [(a, b) for a in sorted(prefill) for b in sorted(decode) if a != b]
    if prefill and decode and not wanted:
        return LinkVerdict("True", Reason.LINK_OK, "both pools share a node: KV does not leave it")
    if need is None:
        return LinkVerdict("Unknown", Reason.NOT_MEASURED, "no worker has reported its model and speed yet")
    pairs = _measured_pairs(wanted, given.links, need, prefill, decode)
    if not pairs:
        return LinkVerdict(
            "Unknown",
            Reason.NOT_MEASURED,
            f"no link between the pools was measured in the last {MAX_AGE_S:.0f} s",
            need_bytes_per_s=need.bytes_per_s_per_worker,
        )
    margin = RETURN_MARGIN if given.memory.cause is Reason.LINK_DEGRADED else 1.0
    return _judge_pairs(pairs, need, margin)


def _judge_transfers(window: TransferWindow) -> LinkVerdict | None:
    if window.failures < MIN_FAILURES or window.failures <= MAX_FAILURE_SHARE * window.attempts:
        return None
    why = f", most often {window.worst_reason}" if window.worst_reason else ""
    return LinkVerdict(
        "False",
        Reason.TRANSFER_FAILURES,
        f"{window.failures} of {window.attempts} KV transfers failed{why}; "
        f"at most {format_percent(MAX_FAILURE_SHARE)} may",
    )


def _workers_by_node(workers: Sequence[WorkerFacts]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    ready = [worker for worker in workers if worker.ready and worker.node]
    prefill = Counter(worker.node for worker in ready if worker.pool is Pool.PREFILL)
    decode = Counter(worker.node for worker in ready if worker.pool is Pool.DECODE)
    return prefill, decode


def _measured_pairs(
    wanted: Sequence[tuple[str, str]],
    links: Sequence[LinkFacts],
    need: LinkNeed,
    prefill: Mapping[str, int],
    decode: Mapping[str, int],
) -> list[_Pair]:
    """Pairs that carry KV and were measured, the newest measurement of each."""
    newest: dict[tuple[str, str], LinkFacts] = {}
    for link in links:
        key = (link.from_node, link.to_node)
        if (
            link.age_s <= MAX_AGE_S
            and is_positive(link.bytes_per_s)
            and (key not in newest or link.age_s < newest[key].age_s)
        ):
            newest[key] = link
    total_prefill, total_decode = sum(prefill.values()), sum(decode.values())
    pairs = []
    for a, b in wanted:
        if (a, b) not in newest:
            continue
        # A node sends what all its prefill workers make, and receives its share of what all make.
        sharing = max(prefill[a], total_prefill * decode[b] / total_decode) if need.summed else 1.0
        needed = need.bytes_per_s_per_worker * sharing
        pairs.append(_Pair(newest[a, b], needed, prefill[a] * decode[b]))
    return pairs


def _judge_pairs(pairs: Sequence[_Pair], need: LinkNeed, margin: float) -> LinkVerdict:
    worst = min(pairs, key=lambda pair: (pair.ratio, pair.link.from_node, pair.link.to_node))
    slow = [pair for pair in pairs if pair.ratio < margin]
    slow_weight = sum(pair.weight for pair in slow)
    # Routers avoid a slow pair while others carry the load; the split stops when most are slow.
    degraded = 2 * slow_weight > sum(pair.weight for pair in pairs)
    unsettled = degraded and not all(pair.link.settled for pair in slow)
    have, needed = worst.link.bytes_per_s, worst.need_bytes_per_s * margin
    verb = "carries only" if slow else "carries"
    message = (
        f"the link from {worst.link.from_node} to {worst.link.to_node} {verb} {format_rate(have)}; "
        f"the split needs {format_rate(needed)}{_origin(need)}"
    )
    if slow and not degraded:
        message += f"; {len(slow)} of {len(pairs)} links are too slow and routers avoid them"
    if unsettled:
        return LinkVerdict(
            "Unknown",
            Reason.NOT_MEASURED,
            f"{message}; it is being measured again before that is believed",
            need_bytes_per_s=needed,
            have_bytes_per_s=have,
            worst=worst.link,
        )
    return LinkVerdict(
        "False" if degraded else "True",
        Reason.LINK_DEGRADED if degraded else Reason.LINK_OK,
        message,
        need_bytes_per_s=needed,
        have_bytes_per_s=have,
        worst=worst.link,
    )


def _origin(need: LinkNeed) -> str:
    if need.prompt_tokens_per_s is None:
        return " (transfer.minBandwidth)"
    return (
        f" ({need.prompt_tokens_per_s:.0f} prompt tokens/s per worker x {need.kv_bytes_per_token:.0f} bytes "
        f"at {format_percent(USABLE_SHARE)} use)"
    )

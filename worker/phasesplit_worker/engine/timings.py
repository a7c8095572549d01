"""Durations of a finished leg from a sequence's monotonic timestamps. Pure."""

from phasesplit_worker.requests import RequestTimings
from phasesplit_worker.sequence import RequestKind, Sequence


def timings_of(sequence: Sequence) -> RequestTimings:
    """Queue: arrival to first step. Prefill: to the first token. Decode: from there to the end."""
    end_s = sequence.finished_s if sequence.finished_s is not None else sequence.arrival_s
    started_s = sequence.scheduled_s
    queue_s = (started_s if started_s is not None else end_s) - sequence.arrival_s
    pulled = sequence.kind is RequestKind.DECODE and sequence.recomputed is None
    first_s = started_s if pulled else sequence.first_token_s
    prefill_s = None
    if not pulled and started_s is not None and first_s is not None:
        prefill_s = first_s - started_s
    decode_s = end_s - first_s if first_s is not None and not sequence.is_prefill_only else None
    return RequestTimings(
        queue_s=max(queue_s, 0.0),
        prefill_s=prefill_s,
        decode_s=decode_s,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=len(sequence.output_token_ids),
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        recomputed=sequence.recomputed,
    )

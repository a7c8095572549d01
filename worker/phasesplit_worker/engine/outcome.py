"""When a sequence ends and what its leg took. Pure."""

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


def finish_reason_of(
    sequence: Sequence, token_id: int, eos_token_ids: frozenset[int], max_model_length: int
) -> str | None:
    """Why the sequence ends with `token_id`, its newest output token; None when it goes on."""
    sampling, num_output = sequence.sampling, len(sequence.output_token_ids)
    if num_output >= sampling.min_tokens:
        is_eos = token_id in eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return "stop"
    if num_output >= sampling.max_tokens or sequence.num_tokens >= max_model_length:
        return "length"
    return None

"""Chooses tokens from logits. Noise is a function of (seed, position) alone.

So a sequence continues with the same tokens after a preemption, a transfer or a migration, whatever
else is in the batch. Works on the CPU in float32; knows nothing of KV or scheduling.
"""

import hashlib
import struct
from collections.abc import Sequence as Items

import torch

from phasesplit_worker.requests import TokenLogprob
from phasesplit_worker.sequence import Sequence


def sample(
    logits: torch.Tensor, sequences: Items[Sequence], eos_token_ids: frozenset[int]
) -> list[tuple[int, TokenLogprob | None]]:
    """One token per row of float32 `logits` [S, vocabulary], with log probabilities if asked for."""
    best = logits.argmax(dim=-1).tolist()
    return [
        _sample_one(logits[row], sequence, best[row], eos_token_ids) for row, sequence in enumerate(sequences)
    ]


def _sample_one(
    logits: torch.Tensor, sequence: Sequence, best: int, eos_token_ids: frozenset[int]
) -> tuple[int, TokenLogprob | None]:
    sampling = sequence.sampling
    blocked = _blocked_tokens(sequence, eos_token_ids)
    token_id = best
    if blocked or sampling.has_penalties or not sampling.is_greedy:
        adjusted = logits.cpu().clone()
        if sampling.has_penalties:
            _penalise(adjusted, sequence)
        if blocked:
            adjusted[list(blocked)] = float("-inf")
        token_id = int(adjusted.argmax()) if sampling.is_greedy else _draw(adjusted, sequence)
    if sampling.logprobs is None:
        return token_id, None
    return token_id, _logprob(logits, token_id, sampling.logprobs)


def _blocked_tokens(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that would end the sequence before its minimum."""
    if len(sequence.output_token_ids) >= sequence.sampling.min_tokens:
        return frozenset()
    return eos_token_ids.union(sequence.sampling.stop_token_ids)


def _penalise(logits: torch.Tensor, sequence: Sequence) -> None:
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*sequence.prompt_token_ids, *sequence.output_token_ids}))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.output_token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.bincount(torch.tensor(sequence.output_token_ids), minlength=logits.shape[0])
        logits -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts


def _draw(logits: torch.Tensor, sequence: Sequence) -> int:
    """Gumbel-max over what top-k and top-p leave."""
    sampling = sequence.sampling
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[0]:
        threshold = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if sampling.top_p < 1:
        values, order = logits.sort(descending=True)
        probabilities = values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        logits[order[before >= sampling.top_p]] = float("-inf")
    return int((logits + gumbel_noise(sequence.seed, sequence.num_tokens, logits.shape[0])).argmax())


def gumbel_noise(seed: int, position: int, size: int) -> torch.Tensor:
    """Noise for the token at `position` of a sequence; always made on the CPU."""
    key = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    uniform = torch.rand(size, generator=generator).clamp_(min=1e-20)
    exponential = (-torch.log(uniform)).clamp_(min=1e-20)  # uniform may round to 1
    return -torch.log(exponential)


def _logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Of the model's own distribution, before penalties and temperature."""
    logprobs = logits.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)

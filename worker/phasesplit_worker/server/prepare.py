"""From a checked body to an engine request: tokens, limits, sampling.

Knows tokens and the model's limits; knows nothing of HTTP answers. Long texts are tokenised off the
event loop.
"""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phasesplit.api.legs import InternalParams, KVTransferParams
from phasesplit_http.errors import ApiError, bad_request
from phasesplit_worker.errors import RequestError
from phasesplit_worker.requests import EngineRequest
from phasesplit_worker.sequence import RequestKind, SamplingParams
from phasesplit_worker.server.ports import TokenizerApi
from phasesplit_worker.server.schemas import ChatBody, CompletionBody

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_INLINE_CHARS = 4096
# Few at a time: the longest body that is allowed takes half a gigabyte while it becomes tokens.
MAX_LONG_TEXTS = 2
_LONG_TEXTS = ThreadPoolExecutor(MAX_LONG_TEXTS, thread_name_prefix="tokenise")


@dataclass(frozen=True)
class Limits:
    """What the loaded model allows."""

    max_model_length: int
    vocabulary_size: int


async def encode_prompt(
    body: CompletionBody | ChatBody, tokenizer: TokenizerApi, limits: Limits
) -> list[int]:
    """The prompt's tokens; raises a 400 naming `prompt` or `messages`."""
    if isinstance(body, CompletionBody):
        prompt = body.one_prompt()
        if isinstance(prompt, list):
            return _check_token_ids(prompt, limits)
        return await _encode(lambda: tokenizer.encode(prompt), len(prompt), "prompt")
    messages = [message.for_template() for message in body.messages]
    length = sum(len(message["content"]) for message in messages)
    return await _encode(lambda: tokenizer.encode_chat(messages), length, "messages")


async def _encode(encode: Callable[[], list[int]], num_chars: int, param: str) -> list[int]:
    try:
        if num_chars <= _INLINE_CHARS:
            tokens = encode()
        else:
            tokens = await asyncio.get_running_loop().run_in_executor(_LONG_TEXTS, encode)
    except RequestError as error:
        raise bad_request(str(error), error.parameter or param) from error
    if not tokens:
        raise bad_request(f"{param}: it has no tokens; send at least one.", param)
    return tokens


def _check_token_ids(prompt: list[int], limits: Limits) -> list[int]:
    for token_id in prompt:
        if not 0 <= token_id < limits.vocabulary_size:
            raise bad_request(
                f"prompt: token id {token_id} is not in the vocabulary of {limits.vocabulary_size} tokens.",
                "prompt",
            )
    return prompt


def context_error(num_prompt: int, max_tokens: int | None, limits: Limits, param: str) -> ApiError:
    """400: the prompt, or prompt plus answer, is over the model's length."""
    limit = limits.max_model_length
    if max_tokens is None or num_prompt >= limit:
        message = (
            f"This model's maximum context length is {limit} tokens, but your prompt has {num_prompt} "
            "tokens; send a shorter prompt."
        )
    else:
        message = (
            f"This model's maximum context length is {limit} tokens, but you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in your prompt, {max_tokens} for the answer); "
            "send a shorter prompt or lower max_tokens."
        )
    return bad_request(message, param, "context_length_exceeded")


def output_tokens(body: CompletionBody | ChatBody, num_prompt: int, limits: Limits) -> int:
    """The answer's longest length; raises a 400 where prompt and answer do not fit."""
    if isinstance(body, ChatBody):
        asked, param, default = body.max_output_tokens, "messages", limits.max_model_length - num_prompt
    else:
        asked, param = body.max_tokens, "prompt"
        default = min(DEFAULT_COMPLETION_TOKENS, limits.max_model_length - num_prompt)
    if num_prompt >= limits.max_model_length:
        raise context_error(num_prompt, None, limits, param)
    max_tokens = default if asked is None else asked
    if num_prompt + max_tokens > limits.max_model_length:
        raise context_error(num_prompt, max_tokens, limits, param)
    if body.min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens: {body.min_tokens} is more than max_tokens {max_tokens}.", "min_tokens"
        )
    return max_tokens


def num_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Alternatives per token, None for no log probabilities."""
    if isinstance(body, ChatBody):
        return body.top_logprobs if body.logprobs else None
    return body.logprobs


def build_sampling(body: CompletionBody | ChatBody, max_tokens: int) -> SamplingParams:
    """The engine's sampling parameters."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        seed=body.seed,
        stop=body.stop_strings,
        ignore_eos=body.ignore_eos,
        logprobs=num_logprobs(body),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        stop_token_ids=tuple(body.stop_token_ids),
    )


def leg_kind(transfer: KVTransferParams | None) -> RequestKind:
    """Which leg the router asks for; raises a 400 when it asks for both or names no peer."""
    if transfer is None or not (transfer.do_remote_decode or transfer.do_remote_prefill):
        return RequestKind.LOCAL
    field = "kv_transfer_params"
    if transfer.do_remote_decode and transfer.do_remote_prefill:
        raise bad_request(f"{field}: do_remote_decode and do_remote_prefill exclude each other.", field)
    if transfer.do_remote_decode:
        return RequestKind.PREFILL
    for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
        if getattr(transfer, name) is None:
            raise bad_request(f"{field}: {name} is needed with do_remote_prefill.", f"{field}.{name}")
    return RequestKind.DECODE


def build_request(
    *,
    request_id: str,
    body: CompletionBody | ChatBody,
    prompt: list[int],
    transfer: KVTransferParams | None,
    internal: InternalParams,
    limits: Limits,
) -> EngineRequest:
    """The engine request of one leg. Sampling noise is fixed by a seed in any case."""
    for token_id in internal.output_token_ids:
        if not 0 <= token_id < limits.vocabulary_size:
            raise bad_request(
                f"phasesplit: output token id {token_id} is not in the vocabulary.",
                "phasesplit.output_token_ids",
            )
    seed = body.seed if body.seed is not None else internal.seed
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=build_sampling(body, output_tokens(body, len(prompt), limits)),
        kind=leg_kind(transfer),
        priority=internal.priority,
        slo_class=internal.slo_class,
        output_token_ids=tuple(internal.output_token_ids),
        seed=secrets.randbits(63) if seed is None else seed,
    )

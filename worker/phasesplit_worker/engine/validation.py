"""What a request must satisfy before the engine takes it. Raises RequestError; pure."""

from phasesplit_worker.errors import RequestError
from phasesplit_worker.requests import EngineRequest


def check_request(request: EngineRequest, max_model_length: int, vocabulary_size: int) -> None:
    """Refuse what could never be served, naming the parameter at fault."""
    sampling = request.sampling
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    num_known = request.num_known_tokens
    if num_known >= max_model_length:
        message = (
            f"the prompt has {num_known} tokens but this model takes at most {max_model_length} tokens of "
            f"prompt and answer together; shorten it"
        )
        raise RequestError(message, "prompt")
    tokens = (*request.prompt_token_ids, *request.output_token_ids)
    if min(tokens) < 0 or max(tokens) >= vocabulary_size:
        raise RequestError(f"token ids must lie between 0 and {vocabulary_size - 1}", "prompt")
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; use at least 1", "max_tokens")
    if len(request.output_token_ids) >= sampling.max_tokens:
        message = f"{len(request.output_token_ids)} tokens are replayed, which already is max_tokens"
        raise RequestError(message, "max_tokens")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p is {sampling.top_p}; use more than 0 and at most 1", "top_p")
    if sampling.repetition_penalty <= 0:
        message = f"repetition_penalty is {sampling.repetition_penalty}; use more than 0"
        raise RequestError(message, "repetition_penalty")

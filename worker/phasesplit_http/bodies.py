"""A request's body: read within a time limit, and as a JSON object whose strings are real text.

Knows aiohttp and JSON; knows nothing of what the fields mean.
"""

import asyncio
import json
from typing import Any

from aiohttp import web

from phasesplit_http.errors import ApiError, bad_request

_SURROGATE = "it has half of a surrogate pair, which is no character; send whole characters"
_TOO_DEEP = "The JSON of the request body is nested too deeply; flatten it."


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """The whole body. aiohttp enforces the size limit while reading."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(
            408,
            f"The request body did not arrive within {timeout_s:.0f} s; send it again.",
            code="request_timeout",
        ) from error
    except web.RequestPayloadError as error:  # chunks or compression that cannot be decoded
        raise bad_request(
            "The request body cannot be decoded; send it as its headers Content-Encoding and "
            "Transfer-Encoding say."
        ) from error


def json_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object, or a 400."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise bad_request(_TOO_DEEP) from error
    except ValueError as error:
        detail = "it is not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
        raise bad_request(f"The request body is not valid JSON: {detail}.") from error
    if not isinstance(body, dict):
        raise bad_request("The request body must be a JSON object.")
    encode_json(body)
    return body


def encode_json(body: dict[str, Any]) -> bytes:
    """An object as UTF-8; a 400 where it holds what is no text or is nested too deeply.

    Python reads half a surrogate pair without complaint, but tokenizers and UTF-8 refuse it.
    """
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    except RecursionError as error:
        raise bad_request(_TOO_DEEP) from error
    except UnicodeEncodeError as error:
        name = next((name for name, value in body.items() if not _is_text({name: value})), None)
        shown = name if name is not None and _is_text({name: None}) else None
        subject = "The request body is not valid JSON" if shown is None else shown
        raise bad_request(f"{subject}: {_SURROGATE}.", shown) from error


def _is_text(body: dict[str, Any]) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")

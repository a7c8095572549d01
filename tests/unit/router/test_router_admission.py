"""What gets in and what is tried again: admission, parsing, quarantine, retries."""

import json
import random

import pytest

from phasesplit.api.routing import LatencyClass, RoutingTable, WhenInfeasible
from phasesplit_http.errors import ApiError
from phasesplit_router.admission import Outlook, refuse
from phasesplit_router.quarantine import Quarantine
from phasesplit_router.request import Endpoint, clean_request_id, parse_request
from phasesplit_router.retry import RetryBudget, backoff_s

STRICT = LatencyClass(name="strict", ttft_s=1.0, tpot_s=0.1, when_infeasible=WhenInfeasible.REJECT)
KIND = LatencyClass(name="kind", ttft_s=1.0, tpot_s=0.1)


def outlook(**fields: float | bool) -> Outlook:
    known = {
        "is_measured": True,
        "prefill_wait_s": 0.0,
        "decode_wait_s": 0.0,
        "own_prefill_s": 0.2,
        "num_queued": 0,
        "max_queued": 10,
    }
    return Outlook(**(known | fields))  # type: ignore[arg-type]


ADMISSION = {
    "idle": (KIND, outlook(), ""),
    "waits but in time": (KIND, outlook(prefill_wait_s=0.7), ""),
    "waits too long for prefill": (KIND, outlook(prefill_wait_s=0.9), "prefill_queue"),
    "waits too long for decode": (KIND, outlook(decode_wait_s=5.0), "decode_queue"),
    "the waits overlap": (KIND, outlook(prefill_wait_s=0.7, decode_wait_s=0.7), ""),
    "infeasible, served": (KIND, outlook(own_prefill_s=2.0), ""),
    "infeasible, refused": (STRICT, outlook(own_prefill_s=2.0), "infeasible"),
    "infeasible, served even when it waits": (KIND, outlook(own_prefill_s=2.0, prefill_wait_s=9.0), ""),
    "nothing measured": (STRICT, outlook(is_measured=False, own_prefill_s=9.0, prefill_wait_s=9.0), ""),
    "queue full": (KIND, outlook(is_measured=False, num_queued=10), "queue_full"),
}


@pytest.mark.parametrize("name", ADMISSION)
def test_admission(name: str) -> None:
    latency_class, expectation, reason = ADMISSION[name]
    error = refuse(latency_class, expectation)
    assert (error.reason if error else "") == reason
    if error:
        assert error.status == 429
        assert 1 <= int(error.headers()["Retry-After"]) <= 60
        assert error.body()["error"]["type"] == "rate_limit_error"


def test_a_pair_is_left_alone_after_repeats_and_longer_each_time() -> None:
    quarantine = Quarantine()
    assert not quarantine.failed("p", "d", 0)
    assert not quarantine.failed("p", "d", 1)
    assert quarantine.active(1) == frozenset()
    assert quarantine.failed("p", "d", 2)
    assert quarantine.active(3) == {("p", "d")}
    assert quarantine.active(7.1) == frozenset()
    assert quarantine.failed("p", "d", 8)  # on probation: once is enough, and it lasts twice as long
    assert quarantine.active(17.9) == {("p", "d")}
    assert quarantine.active(18.1) == frozenset()
    quarantine.succeeded("p", "d")
    assert not quarantine.failed("p", "d", 20)


def test_failures_far_apart_do_not_add_up() -> None:
    quarantine = Quarantine()
    assert not any(quarantine.failed("p", "d", 100.0 * number) for number in range(10))


def test_pairs_of_gone_pods_are_forgotten() -> None:
    quarantine = Quarantine()
    for _ in range(3):
        quarantine.failed("p", "d", 0)
    quarantine.keep_only(frozenset({"p"}))
    assert quarantine.active(1) == frozenset()


def test_a_burst_of_replays_passes_and_a_storm_is_slowed() -> None:
    budget = RetryBudget(per_second=10, burst=64, _left=64)
    assert [budget.take(0.0) for _ in range(64)] == [0.0] * 64
    waits = [budget.take(0.0) for _ in range(20)]
    assert waits == pytest.approx([number / 10 for number in range(1, 21)])
    assert budget.take(100.0) == 0.0


def test_backoff_is_jittered_and_bounded() -> None:
    draw = random.Random(1)
    assert all(0.01 <= backoff_s(1, draw) <= 0.05 for _ in range(100))
    assert all(backoff_s(9, draw) <= 2.0 for _ in range(100))


TABLE = RoutingTable(model="m", classes=(KIND, STRICT))


def parse(body: object, endpoint: Endpoint = Endpoint.CHAT, asked: str | None = None):  # type: ignore[no-untyped-def]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(
        raw, endpoint, TABLE, request_id="id", leg_id="leg", asked_class=asked, random_seed=5
    )


def test_a_parsed_request_becomes_a_streamed_leg() -> None:
    body = {"messages": [{"role": "user", "content": "häuser"}], "max_tokens": 9, "max_completion_tokens": 4}
    request = parse(body, asked="strict")
    leg = json.loads(request.leg_body + b"}")
    assert leg["stream"] is True
    assert leg["stream_options"] == {"include_usage": True}
    assert leg["model"] == "m"
    assert (request.max_tokens, request.seed, request.latency_class) == (4, 5, STRICT)
    assert request.prompt_bytes == 16 + 7
    assert parse(body | {"seed": -3}).seed == -3
    assert parse(body).latency_class == KIND


PROMPTS = [("abcd", 4), ([1, 2, 3], 12), (["abc"], 3), ([[1, 2]], 8)]


@pytest.mark.parametrize(("prompt", "num_bytes"), PROMPTS)
def test_prompt_forms(prompt: object, num_bytes: int) -> None:
    assert parse({"prompt": prompt}, Endpoint.COMPLETION).prompt_bytes == num_bytes


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], None, 5])
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse({"prompt": prompt}, Endpoint.COMPLETION)
    assert caught.value.param == "prompt"


def test_request_ids_are_cleaned() -> None:
    assert clean_request_id("abc-1.2:3_x") == "abc-1.2:3_x"
    for bad in (None, "", "a b", "x" * 101, "a\n", "ü", "../x"):
        assert clean_request_id(bad) is None


HALF = "\ud83d"  # half an emoji; Python's JSON reads it without complaint
BAD_BODIES = {
    "text": ({"messages": [{"role": "user", "content": HALF}]}, "messages"),
    "stop": ({"messages": [{"role": "user", "content": "a"}], "stop": [HALF]}, "stop"),
    "name of a field": ({"messages": [{"role": "user", "content": "a"}], HALF: 1}, None),
    "many choices": ({"messages": [{"role": "user", "content": "a"}], "n": "2" * 100_000}, "n"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_what_no_worker_can_read_costs_no_attempt(case: str) -> None:
    body, param = BAD_BODIES[case]
    for raw in (
        json.dumps(body).encode(),
        json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(raw)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert len(caught.value.encoded()) < 3000


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_every_depth_is_served_or_refused(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    for depth in range(800, 1100):
        middle = b"1" if opening != b"[" else b""
        nested = opening * depth + middle + closing * depth
        try:
            parse(b'{"messages":[{"role":"user","content":"a"}],"metadata":' + nested + b"}")
        except ApiError as error:
            assert error.status == 400  # most depths are no error

"""The engine on its thread: requests from anywhere, refusals, failures, pacing, drain and stop."""

import json
import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers_engine import greedy, loaded_model, plain_greedy, random_prompt, worker_config
from phasesplit.api.names import Role
from phasesplit_worker.engine.engine import Engine
from phasesplit_worker.errors import EngineStoppedError, RequestError
from phasesplit_worker.requests import EngineOutput, EngineRequest, StepRecord
from phasesplit_worker.sequence import RequestKind, SamplingParams

WAIT_S = 60


@contextmanager
def running_engine(**options: object) -> Iterator[Engine]:
    on_step = options.pop("on_step", None)
    engine = Engine(worker_config(**options), loaded_model(), on_step=on_step)  # type: ignore[arg-type]
    engine.start()
    try:
        yield engine
    finally:
        assert engine.stop(WAIT_S)


def request(name: str, prompt: tuple[int, ...], sampling: SamplingParams, **options: object) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, **options)  # type: ignore[arg-type]


def read_all(outputs: "queue.Queue[EngineOutput]") -> tuple[list[int], EngineOutput]:
    tokens: list[int] = []
    while True:
        output = outputs.get(timeout=WAIT_S)
        tokens += output.token_ids
        if output.is_last:
            return tokens, output


def wait_until_idle(engine: Engine) -> None:
    """Idle, and the first steps are measured."""
    end = time.monotonic() + WAIT_S
    while not engine.is_idle() or engine.profile().guessed:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_requests_from_several_threads_all_get_their_answers() -> None:
    generator = random.Random(1)
    prompts = [random_prompt(generator, 10 + 9 * n) for n in range(8)]
    answers: dict[int, list[int]] = {}
    records: list[StepRecord] = []
    with running_engine(on_step=records.append) as engine:

        def ask(number: int) -> None:
            outputs: queue.Queue[EngineOutput] = queue.Queue()
            engine.submit(request(f"r{number}", prompts[number], greedy(8)), outputs.put)
            answers[number], _ = read_all(outputs)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        wait_until_idle(engine)
        assert engine.stats().kv_used_blocks == 0
        assert not engine.profile().guessed
        assert engine.failure is None
    for number, prompt in enumerate(prompts):
        assert answers[number] == plain_greedy("llama", prompt, 8)
    assert sum(record.prefill_tokens for record in records) == sum(map(len, prompts))
    assert {record.mix for record in records} <= {"prefill", "decode", "mixed"}


@pytest.mark.parametrize(
    ("prompt", "sampling", "parameter"),
    [
        ((), greedy(4), "prompt"),
        ((1,) * 3000, greedy(4), "prompt"),
        ((1, 99_999), greedy(4), "prompt"),
        ((1, 2), greedy(0), "max_tokens"),
        ((1, 2), SamplingParams(top_p=0.0), "top_p"),
        ((1, 2), SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
    ],
)
def test_what_can_never_be_served_is_refused(
    prompt: tuple[int, ...], sampling: SamplingParams, parameter: str
) -> None:
    engine = Engine(worker_config(), loaded_model())
    with pytest.raises(RequestError) as caught:
        engine.submit(request("r", prompt, sampling), print)
    assert caught.value.parameter == parameter
    assert engine.is_idle()


def test_an_abort_ends_a_running_request_and_frees_its_blocks() -> None:
    with running_engine() as engine:
        outputs: queue.Queue[EngineOutput] = queue.Queue()
        engine.submit(request("r", (7, 8, 9), greedy(1500, ignore_eos=True)), outputs.put)
        outputs.get(timeout=WAIT_S)
        engine.abort("r", "stop")
        _, last = read_all(outputs)
        assert last.finish_reason == "stop"
        wait_until_idle(engine)
        assert engine.stats().kv_used_blocks == 0


def test_two_requests_of_one_id_are_an_error_for_the_second() -> None:
    with running_engine() as engine:
        first: queue.Queue[EngineOutput] = queue.Queue()
        second: queue.Queue[EngineOutput] = queue.Queue()
        engine.submit(request("r", (7, 8, 9), greedy(40, ignore_eos=True)), first.put)
        engine.submit(request("r", (7, 8, 9), greedy(40, ignore_eos=True)), second.put)
        assert read_all(second)[1].finish_reason == "error"
        assert read_all(first)[1].finish_reason == "length"


def test_a_draining_engine_finishes_and_takes_nothing_new() -> None:
    with running_engine() as engine:
        outputs: queue.Queue[EngineOutput] = queue.Queue()
        engine.submit(request("r", (7, 8, 9), greedy(30, ignore_eos=True)), outputs.put)
        engine.drain()
        with pytest.raises(EngineStoppedError, match="draining"):
            engine.submit(request("late", (7, 8, 9), greedy(4)), outputs.put)
        assert len(read_all(outputs)[0]) == 30


def test_stopping_ends_what_is_left() -> None:
    outputs: queue.Queue[EngineOutput] = queue.Queue()
    with running_engine() as engine:
        engine.submit(request("r", (7, 8, 9), greedy(1900, ignore_eos=True)), outputs.put)
        outputs.get(timeout=WAIT_S)
    assert read_all(outputs)[1].finish_reason == "abort"


def test_a_failing_step_is_told_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as engine:
        wait_until_idle(engine)
        outputs: queue.Queue[EngineOutput] = queue.Queue()

        def fail(*_: object) -> None:
            monkeypatch.undo()
            raise RuntimeError("out of memory")

        monkeypatch.setattr("phasesplit_worker.engine.core.build_batch", fail)
        engine.submit(request("bad", (7, 8, 9), greedy(4)), outputs.put)
        last = read_all(outputs)[1]
        assert last.finish_reason == "error" and last.error is not None and "step" in last.error
        engine.submit(request("good", (7, 8, 9), greedy(4)), outputs.put)
        assert read_all(outputs)[0] == plain_greedy("llama", (7, 8, 9), 4)


def test_a_dead_thread_answers_everybody_and_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as engine:
        wait_until_idle(engine)
        outputs: queue.Queue[EngineOutput] = queue.Queue()

        def fail(*_: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr("phasesplit_worker.engine.core.build_batch", fail)
        engine.submit(request("bad", (7, 8, 9), greedy(4)), outputs.put)
        assert read_all(outputs)[1].finish_reason == "error"
        end = time.monotonic() + WAIT_S
        while engine.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(EngineStoppedError, match="failed"):
            engine.submit(request("late", (7, 8, 9), greedy(4)), outputs.put)


def test_a_paced_token_comes_at_the_end_of_its_declared_step(tmp_path: Path) -> None:
    pace = tmp_path / "pace.json"
    pace.write_text(json.dumps({"base_s": 0.3}))
    with running_engine(pace_file=pace) as engine:
        times_s: list[float] = []
        outputs: queue.Queue[EngineOutput] = queue.Queue()

        def take(output: EngineOutput) -> None:
            times_s.append(time.monotonic())
            outputs.put(output)

        started_s = time.monotonic()
        engine.submit(request("r", tuple(range(5, 25)), greedy(2)), take)
        read_all(outputs)
    assert times_s[0] - started_s >= 0.3
    assert times_s[1] - times_s[0] >= 0.29


def test_pacing_stretches_steps_and_reports_the_declared_profile(tmp_path: Path) -> None:
    pace = tmp_path / "pace.json"
    pace.write_text(json.dumps({"base_s": 0.08}))
    with running_engine(pace_file=pace) as engine:
        assert engine.is_paced and engine.profile().base_s == 0.08
        outputs: queue.Queue[EngineOutput] = queue.Queue()
        started = time.monotonic()
        engine.submit(request("r", (7, 8, 9), greedy(5, ignore_eos=True)), outputs.put)
        assert len(read_all(outputs)[0]) == 5
        assert time.monotonic() - started >= 4 * 0.08


def test_the_heartbeat_goes_on_while_idle_and_a_role_can_change() -> None:
    with running_engine() as engine:
        wait_until_idle(engine)
        engine.set_role(Role.PREFILL)
        before = engine.heartbeat_s
        end = time.monotonic() + WAIT_S
        while engine.heartbeat_s == before and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.heartbeat_s > before
        assert engine.longest_step_s >= 1.0


def test_a_reservation_waits_for_blocks_and_is_given_up_by_an_abort() -> None:
    with running_engine(kv_cache_bytes=8 << 20) as engine:
        outputs: queue.Queue[EngineOutput] = queue.Queue()
        reservation = engine.reserve(request("r", (7,) * 40, greedy(4), kind=RequestKind.DECODE), outputs.put)
        assert len(reservation.result(timeout=WAIT_S).block_ids) == 3
        assert engine.stats().num_running <= 1
        engine.release_held("r")
        assert read_all(outputs)[1].finish_reason == "abort"
        wait_until_idle(engine)

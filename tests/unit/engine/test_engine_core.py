"""The engine without its thread: tokens equal plain transformers whatever happens to a sequence."""

import random

import pytest

from helpers_engine import (
    BLOCK_SIZE,
    Bench,
    build_bench,
    greedy,
    plain_greedy,
    plain_greedy_along,
    random_prompt,
)
from phasesplit_worker.sequence import RequestKind, SamplingParams

VARIANTS = ("llama", "llama-gqa")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reference", [False, True], ids=["fused", "reference"])
def test_greedy_tokens_equal_transformers_over_many_prompts(variant: str, reference: bool) -> None:
    generator = random.Random(variant)
    bench = build_bench(variant, reference=reference)
    prompts = {f"r{n}": random_prompt(generator, generator.randrange(1, 140)) for n in range(25)}
    answers = {name: bench.submit(name, prompt, greedy(16)) for name, prompt in prompts.items()}
    bench.run()
    for name, prompt in prompts.items():
        tokens = answers[name].token_ids
        assert tokens == plain_greedy_along(variant, prompt, tokens, 16)
    assert bench.blocks.num_used_blocks == 0


@pytest.mark.parametrize("max_prefill_tokens", [8, 13, 40])
def test_chunked_prefill_gives_the_same_tokens(max_prefill_tokens: int) -> None:
    generator = random.Random(3)
    bench = build_bench(max_prefill_tokens=max_prefill_tokens)
    prompts = {f"r{n}": random_prompt(generator, 90 + n) for n in range(4)}
    answers = {name: bench.submit(name, prompt, greedy(12)) for name, prompt in prompts.items()}
    bench.run()
    for name, prompt in prompts.items():
        tokens = answers[name].token_ids
        assert tokens == plain_greedy_along("llama", prompt, tokens, 12)


def test_prefix_hit_gives_the_same_tokens_and_is_counted() -> None:
    generator = random.Random(4)
    shared = random_prompt(generator, 70)
    bench = build_bench()
    bench.submit("first", shared, greedy(4))
    bench.run()
    prompt = (*shared[:50], *random_prompt(generator, 9))
    answer = bench.submit("second", prompt, greedy(12))
    again = bench.submit("again", shared, greedy(12))
    bench.run()
    assert answer.token_ids == plain_greedy("llama", prompt, 12)
    assert again.token_ids == plain_greedy("llama", shared, 12)
    assert answer.last is not None and answer.last.timings is not None
    assert answer.last.timings.num_cached_tokens == 48
    assert bench.blocks.hit_tokens_total == 48 + 64


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    prompt = random_prompt(random.Random(5), 4 * BLOCK_SIZE)
    bench = build_bench()
    cold = bench.submit("cold", prompt, greedy(8))
    bench.run()
    warm = bench.submit("warm", prompt, greedy(8))
    bench.run()
    assert warm.token_ids == cold.token_ids
    assert warm.last is not None and warm.last.timings is not None
    assert warm.last.timings.num_cached_tokens == 3 * BLOCK_SIZE


def test_preempted_sequences_give_the_same_tokens() -> None:
    generator = random.Random(6)
    bench = build_bench(num_blocks=16)
    prompts = {f"r{n}": random_prompt(generator, 40) for n in range(5)}
    answers = {name: bench.submit(name, prompt, greedy(60)) for name, prompt in prompts.items()}
    bench.run()
    assert bench.scheduler.num_preemptions_total > 0
    for name, prompt in prompts.items():
        tokens = answers[name].token_ids
        assert tokens == plain_greedy_along("llama", prompt, tokens, 60)
    assert bench.blocks.num_used_blocks == 0


def test_sampled_tokens_do_not_depend_on_batch_chunks_or_preemption() -> None:
    generator = random.Random(7)
    sampling = SamplingParams(max_tokens=50, temperature=0.9, top_p=0.9, top_k=40, seed=11)
    prompt = random_prompt(generator, 45)
    alone = build_bench()
    expected = alone.submit("a", prompt, sampling)
    alone.run()
    crowded = build_bench(num_blocks=14, max_prefill_tokens=11)
    others = [crowded.submit(f"o{n}", random_prompt(generator, 30), greedy(50)) for n in range(3)]
    answer = crowded.submit("b", prompt, sampling)
    crowded.run()
    assert crowded.scheduler.num_preemptions_total > 0
    assert answer.token_ids == expected.token_ids
    assert all(other.last is not None for other in others)


def test_a_leg_1_stops_after_the_first_token_and_holds_its_blocks() -> None:
    prompt = random_prompt(random.Random(8), 50)
    bench = build_bench(max_prefill_tokens=20)
    answer = bench.submit("p", prompt, greedy(12), kind=RequestKind.PREFILL, seed=5)
    bench.run()
    first = plain_greedy("llama", prompt, 1)
    assert answer.token_ids == first
    assert answer.last is not None and answer.last.finish_reason is None
    assert bench.hooks.events[0] == ("accepted", "p", 50)
    ready = [event[2] for event in bench.hooks.events if event[0] == "ready"]
    assert ready == [16, 32, 50]
    assert bench.hooks.events[-1] == ("finished", "p", first[0], {"seed": 5, "position": 51})
    assert bench.blocks.num_used_blocks == 4
    assert bench.core.stats().num_held == 1
    bench.core.release_held("p")
    assert bench.blocks.num_used_blocks == 0
    assert bench.core.num_entries == 0


def test_a_leg_1_that_ends_at_its_first_token_holds_nothing() -> None:
    bench = build_bench()
    answer = bench.submit("p", random_prompt(random.Random(9), 20), greedy(1), kind=RequestKind.PREFILL)
    bench.run()
    assert answer.last is not None and answer.last.finish_reason == "length"
    assert bench.blocks.num_used_blocks == 0
    assert bench.hooks.events[-1] == ("aborted", "p", "length")


def _prefill_elsewhere(prompt: tuple[int, ...], sampling: SamplingParams, seed: int) -> tuple[Bench, int]:
    prefill = build_bench("llama")
    answer = prefill.submit("x", prompt, sampling, kind=RequestKind.PREFILL, seed=seed)
    prefill.run()
    return prefill, answer.token_ids[0]


@pytest.mark.parametrize("length", [33, 48, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_leg_2_continues_like_a_local_request(length: int, temperature: float) -> None:
    prompt = random_prompt(random.Random(length), length)
    sampling = SamplingParams(max_tokens=24, temperature=temperature)
    local = build_bench("llama")
    expected = local.submit("x", prompt, sampling, seed=3)
    local.run()

    prefill, first = _prefill_elsewhere(prompt, sampling, seed=3)
    blocks = [event[3] for event in prefill.hooks.events if event[0] == "ready"][-1]
    content = [bytes(prefill.loaded.kv_cache.block_view(block)) for block in blocks]
    prefill.loaded.kv_cache.data.normal_()  # what is not carried over must not matter

    decode = build_bench("llama")
    answer, reservation = decode.reserve("x", prompt, sampling, seed=3)
    decode.step()
    block_ids = reservation.result(timeout=0).block_ids
    assert len(block_ids) == len(blocks) == decode.blocks.num_used_blocks
    for block_id, data in zip(block_ids, content, strict=True):
        decode.loaded.kv_cache.block_view(block_id)[:] = data
    decode.core.start_remote("x", first, length)
    decode.run()
    assert answer.skipped == expected.token_ids[:1] == [first]
    assert answer.token_ids == expected.token_ids[1:]
    assert decode.blocks.num_used_blocks == 0
    assert answer.last is not None and answer.last.timings is not None
    assert answer.last.timings.prefill_s is None


@pytest.mark.parametrize("is_first_known", [True, False])
def test_a_failed_pull_is_recomputed_and_still_starts_at_the_second_token(is_first_known: bool) -> None:
    prompt = random_prompt(random.Random(21), 48)
    expected = plain_greedy("llama", prompt, 10)
    bench = build_bench()
    answer, reservation = bench.reserve("x", prompt, greedy(10))
    bench.step()
    assert reservation.done()
    bench.core.recompute("x", "checksum", expected[0] if is_first_known else None)
    bench.run()
    assert answer.skipped == expected[:1]
    assert answer.token_ids == expected[1:]
    assert answer.last is not None and answer.last.timings is not None
    assert answer.last.timings.recomputed == "checksum"


def test_a_reservation_reuses_cached_blocks() -> None:
    prompt = random_prompt(random.Random(22), 64)
    bench = build_bench()
    expected = bench.submit("before", prompt, greedy(10))
    bench.run()
    answer, reservation = bench.reserve("x", prompt, greedy(10))
    bench.step()
    assert reservation.result(timeout=0).num_cached_tokens == 64
    bench.core.start_remote("x", expected.token_ids[0], 64)
    bench.run()
    assert answer.token_ids == expected.token_ids[1:]


def test_a_recompute_over_a_fully_cached_reservation_does_not_write_shared_blocks() -> None:
    prompt = random_prompt(random.Random(23), 64)
    bench = build_bench()
    expected = bench.submit("before", prompt, greedy(10))
    bench.run()
    answer, _ = bench.reserve("x", prompt, greedy(10))
    bench.step()
    bench.core.recompute("x", "deadline", None)
    bench.run()
    assert answer.skipped + answer.token_ids == expected.token_ids


def test_a_replay_continues_after_the_tokens_the_client_has() -> None:
    prompt = random_prompt(random.Random(24), 40)
    expected = plain_greedy("llama", prompt, 20)
    bench = build_bench()
    answer = bench.submit("x", prompt, greedy(20), output_token_ids=tuple(expected[:7]))
    bench.run()
    assert answer.token_ids == expected[7:]
    assert answer.last is not None and answer.last.timings is not None
    assert answer.last.timings.num_output_tokens == 20


def test_a_replay_through_both_legs_continues_sampling() -> None:
    prompt = random_prompt(random.Random(25), 40)
    sampling = SamplingParams(max_tokens=20, temperature=0.8)
    bench = build_bench()
    expected = bench.submit("local", prompt, sampling, seed=9)
    bench.run()
    known = tuple(expected.token_ids[:6])
    prefill = build_bench()
    first = prefill.submit("x", prompt, sampling, kind=RequestKind.PREFILL, output_token_ids=known, seed=9)
    prefill.run()
    table = [event[3] for event in prefill.hooks.events if event[0] == "ready"][-1]
    content = [bytes(prefill.loaded.kv_cache.block_view(block)) for block in table]
    decode = build_bench()
    answer, reservation = decode.reserve("x", prompt, sampling, output_token_ids=known, seed=9)
    decode.step()
    for block_id, data in zip(reservation.result(timeout=0).block_ids, content, strict=True):
        decode.loaded.kv_cache.block_view(block_id)[:] = data
    decode.core.start_remote("x", first.token_ids[0], 46)
    decode.run()
    assert [*known, *answer.skipped, *answer.token_ids] == expected.token_ids


def test_an_abort_frees_all_blocks_in_every_state() -> None:
    bench = build_bench(num_blocks=12, max_prefill_tokens=16)
    generator = random.Random(26)
    running = bench.submit("running", random_prompt(generator, 20), greedy(500))
    held = bench.submit("held", random_prompt(generator, 20), greedy(9), kind=RequestKind.PREFILL)
    bench.run(until=lambda: held.last is not None)
    partly = bench.submit("partly", random_prompt(generator, 60), greedy(9), kind=RequestKind.PREFILL)
    bench.step()
    waiting = bench.submit("waiting", random_prompt(generator, 150), greedy(9))
    bench.step()
    assert bench.core.stats().num_waiting == 1
    for name in ("running", "held", "partly", "waiting", "unknown"):
        bench.core.abort(name, "abort")
        bench.core.check_integrity()
    assert bench.blocks.num_used_blocks == 0
    assert bench.core.num_entries == 0
    for answer in (running, partly, waiting):
        assert answer.last is not None and answer.last.finish_reason == "abort"
    aborted = [event[1] for event in bench.hooks.events if event[0] == "aborted"]
    assert aborted == ["held", "partly"]


def test_blocks_that_a_transfer_writes_stay_reserved_after_an_abort_until_it_lets_go() -> None:
    bench = build_bench()
    prompt = random_prompt(random.Random(27), 40)
    answer, _ = bench.reserve("x", prompt, greedy(9))
    bench.step()
    bench.core.abort("x", "abort")
    assert answer.last is not None and answer.last.finish_reason == "abort"
    assert bench.blocks.num_used_blocks == 3
    bench.core.start_remote("x", 9, 40)  # the transfer ends and learns nothing of the abort
    assert bench.blocks.num_used_blocks == 0
    bench.reserve("y", prompt, greedy(9))
    bench.step()
    bench.core.abort("y", "abort")
    bench.now[0] += 31
    bench.core.free_expired()
    assert bench.blocks.num_used_blocks == 0


def test_a_cancelled_reservation_is_given_back() -> None:
    bench = build_bench()
    answer, reservation = bench.reserve("x", random_prompt(random.Random(28), 40), greedy(9))
    reservation.cancel()
    bench.step()
    assert answer.last is not None and answer.last.finish_reason == "abort"
    assert bench.blocks.num_used_blocks == 0


def test_stop_tokens_end_a_sequence_unless_it_is_too_short() -> None:
    prompt = random_prompt(random.Random(29), 30)
    expected = plain_greedy("llama", prompt, 20)
    stop = expected[4]
    bench = build_bench()
    stopped = bench.submit("a", prompt, greedy(20, stop_token_ids=(stop,)))
    longer = bench.submit("b", prompt, greedy(20, stop_token_ids=(stop,), min_tokens=8))
    bench.run()
    assert stopped.token_ids == expected[: expected.index(stop) + 1]
    assert stopped.last is not None and stopped.last.finish_reason == "stop"
    assert len(longer.token_ids) >= 8 and stop not in longer.token_ids[:8]


def test_a_hook_that_fails_does_not_end_the_engine() -> None:
    bench = build_bench()
    bench.core.set_hooks(None)
    answer = bench.submit("a", random_prompt(random.Random(30), 30), greedy(3), kind=RequestKind.PREFILL)
    bench.run()
    assert answer.last is not None and bench.core.num_entries == 0


def test_random_operations_keep_the_pool_whole() -> None:
    generator = random.Random(31)
    bench = build_bench(num_blocks=40, max_prefill_tokens=24, max_num_seqs=8)
    answers = {}
    for number in range(1000):
        name = f"r{number}"
        choice = generator.random()
        prompt = (
            *range(5, 5 + 16 * generator.randrange(3)),
            *random_prompt(generator, generator.randrange(1, 50)),
        )
        options = {"priority": generator.randrange(3), "seed": number}
        if choice < 0.15:
            answers[name] = bench.submit(name, prompt, greedy(generator.randrange(1, 20)), **options)
        elif choice < 0.25:
            answers[name] = bench.submit(name, prompt, greedy(5), kind=RequestKind.PREFILL, **options)
        elif choice < 0.35:
            answers[name], _ = bench.reserve(name, prompt, greedy(5), **options)
        elif choice < 0.6 and answers:
            other = generator.choice(list(answers))
            operation = generator.randrange(4)
            if operation == 0:
                bench.core.abort(other, "abort")
            elif operation == 1:
                bench.core.release_held(other)
            elif operation == 2:
                bench.core.recompute(other, "test", generator.choice([None, 7]))
            else:
                bench.core.start_remote(other, 7, generator.randrange(1, 90))
            bench.core.check_integrity()
        else:
            bench.step()
    for name in answers:
        bench.core.abort(name, "abort")
        bench.core.release_held(name)
    bench.core.check_integrity()
    assert bench.blocks.num_used_blocks == 0
    assert bench.core.num_entries == 0
    assert all(answer.last is not None for answer in answers.values())

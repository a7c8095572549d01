"""The life of exported KV: states, times to live, readers, preemptions, blocks given back."""

import threading

import pytest

from helpers_transfer import FINGERPRINT, LAYOUT, eventually, make_sequence
from helpers_transfer_store import BLOCKS, STATE, TOKENS, TTL_S, Setup
from phasesplit.api.manifest import ManifestState
from phasesplit_worker.transfer.ended import MAX_MANIFESTS, MAX_PROMISES, MAX_STATES, PROMISE_S
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.integrity import checksum, hash_token_ids


@pytest.fixture
def setup():
    return Setup()


def test_manifest_grows_with_the_prefill(setup):
    setup.accept()
    first = setup.store.manifest("r")
    assert (first.state, first.num_ready_tokens, first.checksums) == (ManifestState.RUNNING, 0, ())
    assert first.token_ids_hash == hash_token_ids(TOKENS, 4, FINGERPRINT)
    assert (first.num_tokens, first.bytes) == (10, 3 * LAYOUT.bytes_per_block)

    setup.store.on_blocks_ready("r", 9, BLOCKS)
    setup.work()
    half = setup.store.manifest("r")
    assert half.checksums == tuple(checksum(setup.pool.block_view(block)) for block in BLOCKS[:2])
    assert half.first_token is None

    setup.now_s += 2
    setup.store.on_blocks_ready("r", 10, BLOCKS)
    setup.store.on_prefill_finished("r", 42, STATE)
    setup.work()
    last = setup.store.manifest("r")
    assert (last.state, last.first_token, last.sampling_state) == (ManifestState.READY, 42, STATE)
    assert (len(last.checksums), last.blocks, last.engine_id) == (3, BLOCKS, "e")
    assert (last.endpoint, last.age_s, last.expires_in_s) == ("10.0.0.1:8100", 2, TTL_S)


def test_replayed_output_belongs_to_the_kv(setup):
    sequence = make_sequence("r", TOKENS)
    sequence.output_token_ids.extend([90, 91])
    sequence.num_known_tokens = 12
    setup.store.on_prefill_accepted(sequence)
    assert setup.store.manifest("r").token_ids_hash == hash_token_ids([*TOKENS, 90, 91], 4, FINGERPRINT)


def test_pulled_kv_goes_back_to_the_engine_and_is_remembered(setup):
    setup.run()
    setup.store.release("r", pulled=True)
    setup.work()
    assert setup.released == ["r"]
    assert setup.store.num_exports == 0
    assert setup.store.manifest("r").state is ManifestState.PULLED
    assert setup.refusal() is TransferFailure.UNKNOWN_REQUEST


def test_nothing_is_given_back_while_it_is_read(setup):
    setup.run()
    with setup.store.reading("r") as export:
        setup.store.release("r", pulled=True)
        setup.work()
        assert setup.released == []
        with pytest.raises(TransferError):
            setup.store.wait_sealed(export, 0, 1)
    setup.work()
    assert setup.released == ["r"]


def test_time_to_live_counts_from_the_end_of_the_prefill(setup):
    setup.accept()
    setup.now_s += 10 * TTL_S
    setup.work()
    assert setup.store.manifest("r").state is ManifestState.RUNNING
    setup.store.on_blocks_ready("r", 10, BLOCKS)
    setup.store.on_prefill_finished("r", 42, STATE)
    setup.now_s += TTL_S - 0.1
    setup.work()
    assert setup.released == []
    setup.now_s += 0.1
    setup.work()
    assert (setup.released, setup.expired) == (["r"], [3])
    assert setup.refusal() is TransferFailure.EXPIRED


def test_transfer_under_way_does_not_expire(setup):
    setup.run()
    with setup.store.reading("r"):
        setup.now_s += 2 * TTL_S
        setup.work()
        assert setup.expired == []
    setup.work()
    assert setup.expired == [3]


def test_abort_by_the_engine_needs_no_release(setup):
    setup.accept()
    setup.store.on_blocks_ready("r", 4, BLOCKS[:1])
    setup.store.on_prefill_aborted("r", "abort")
    setup.work()
    assert (setup.released, setup.store.num_exports) == ([], 0)
    assert setup.refusal() is TransferFailure.ABORTED


def test_unwanted_prefill_is_released_when_it_has_finished(setup):
    setup.accept()
    setup.store.release("r", pulled=False)
    setup.work()
    assert setup.released == [], "the engine still computes it: its first token is wanted"
    setup.store.on_blocks_ready("r", 10, BLOCKS)
    setup.store.on_prefill_finished("r", 42, STATE)
    setup.work()
    assert setup.released == ["r"]
    assert setup.store.manifest("r").state is ManifestState.ABORTED


def test_confirmation_of_a_running_prefill_is_no_pull(setup):
    setup.accept()
    setup.store.release("r", pulled=True)
    assert setup.store.manifest("r").state is ManifestState.ABORTED


def test_preemption_drops_checksums_of_moved_blocks(setup):
    setup.accept()
    setup.store.on_blocks_ready("r", 8, BLOCKS)
    setup.work()
    assert len(setup.store.manifest("r").checksums) == 2
    setup.store.on_blocks_ready("r", 4, (7, 9))
    assert len(setup.store.manifest("r").checksums) == 1
    setup.store.on_blocks_ready("r", 0, ())
    assert setup.store.manifest("r").checksums == ()
    setup.store.on_blocks_ready("r", 10, (1, 2, 4))
    setup.store.on_prefill_finished("r", 42, STATE)
    setup.work()
    expected = tuple(checksum(setup.pool.block_view(block)) for block in (1, 2, 4))
    assert setup.store.manifest("r").checksums == expected


def test_checksums_of_blocks_that_moved_meanwhile_are_dropped(setup):
    setup.accept()
    setup.store.on_blocks_ready("r", 8, BLOCKS)
    unsealed = setup.store.take_unsealed()
    setup.store.on_blocks_ready("r", 8, (1, 2, 3))
    setup.store.seal(unsealed, ["stale", "stale"])
    assert setup.store.manifest("r").checksums == ()
    setup.work()
    assert setup.store.manifest("r").checksums[0] == checksum(setup.pool.block_view(1))


def test_checksums_read_across_a_preemption_are_dropped_even_if_the_same_blocks_come_back(setup):
    setup.accept()
    setup.store.on_blocks_ready("r", 8, BLOCKS)
    unsealed = setup.store.take_unsealed()
    setup.store.on_blocks_ready("r", 0, ())
    setup.store.on_blocks_ready("r", 8, BLOCKS)
    setup.store.seal(unsealed, ["between", "between"])
    assert setup.store.manifest("r").checksums == ()
    setup.work()
    assert len(setup.store.manifest("r").checksums) == 2


def test_promised_request_is_waited_for_and_others_are_not(setup):
    setup.store.promise("r")
    assert setup.store.wait_accepted("r", 0) is False
    setup.accept()
    assert setup.store.wait_accepted("r", 0) is True
    with pytest.raises(TransferError) as caught:
        setup.store.wait_accepted("other", 0)
    assert caught.value.reason is TransferFailure.UNKNOWN_REQUEST


def test_promise_lapses(setup):
    setup.store.promise("r")
    setup.now_s += PROMISE_S
    with pytest.raises(TransferError):
        setup.store.wait_accepted("r", 0)


def test_promise_of_a_request_that_the_engine_gave_up_is_aborted(setup):
    setup.store.promise("r")
    setup.store.on_prefill_aborted("r", "abort")
    with pytest.raises(TransferError) as caught:
        setup.store.wait_accepted("r", 0)
    assert caught.value.reason is TransferFailure.ABORTED


def test_same_id_may_live_again(setup):
    setup.run()
    setup.store.release("r", pulled=True)
    setup.work()
    setup.run()
    assert setup.store.manifest("r").state is ManifestState.READY
    with setup.store.reading("r") as export:
        assert export.is_complete


def test_memory_of_the_past_is_bounded(setup):
    for number in range(MAX_STATES + 10):
        setup.store.promise(f"r{number}")
        setup.store.on_prefill_aborted(f"r{number}", "abort")
    for number in range(MAX_MANIFESTS + 10):
        setup.run(f"m{number}")
        setup.store.release(f"m{number}", pulled=True)
        setup.work()
    for number in range(MAX_PROMISES + 10):
        setup.store.promise(f"p{number}")
    assert setup.refusal("r0") is TransferFailure.UNKNOWN_REQUEST
    assert setup.store.manifest("m0") is None
    assert setup.store.manifest("m70") is not None


def test_waiting_reader_is_woken_by_the_chunk_and_by_the_abort(setup):
    setup.accept()
    seen: list[object] = []

    def read() -> None:
        with setup.store.reading("r") as export:
            seen.append(setup.store.wait_sealed(export, 0, 5))
            try:
                setup.store.wait_complete(export, 5)
            except TransferError as error:
                seen.append(error.reason)

    thread = threading.Thread(target=read)
    thread.start()
    setup.store.on_blocks_ready("r", 8, BLOCKS)
    setup.work()
    assert eventually(lambda: seen == [2])
    setup.store.on_prefill_aborted("r", "abort")
    thread.join(5)
    assert seen == [2, TransferFailure.ABORTED]


def test_blocks_that_cannot_be_read_abort_their_export_alone(setup, caplog):
    setup.accept("bad")
    setup.store.on_blocks_ready("bad", 4, (-1,))
    setup.pool.block_view = lambda block_id: setup.pool._data[8:] if block_id >= 0 else [][block_id]
    setup.run("good")
    assert setup.store.manifest("bad").state is ManifestState.ABORTED
    assert len(setup.store.manifest("good").checksums) == 3
    assert "request bad" in caplog.text


def test_close_ends_everything(setup):
    setup.run()
    setup.housekeeper.stop()
    setup.work()
    assert setup.released == ["r"]
    assert setup.refusal() is TransferFailure.ABORTED

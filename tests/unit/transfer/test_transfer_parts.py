"""Small parts of the transfer side: proofs, keys, link book, quarantine, cancellation."""

import socket
import threading
import time

import pytest

from phasesplit.api.reports import LinkSample
from phasesplit_worker.errors import ConfigError
from phasesplit_worker.transfer import auth
from phasesplit_worker.transfer.cancellation import Cancellation
from phasesplit_worker.transfer.channel import Channel, Limits
from phasesplit_worker.transfer.errors import PAIR_FAILURES, TransferError, TransferFailure
from phasesplit_worker.transfer.links import MAX_AGE_S, MAX_LINKS, SAMPLES_PER_LINK, LinkBook
from phasesplit_worker.transfer.messages import Heartbeat
from phasesplit_worker.transfer.peers import LONGEST_QUARANTINE_S, MAX_PEERS, Quarantine
from phasesplit_worker.transfer.tcp_server import format_endpoint, listen

KEY = b"k" * 32
PARTS = auth.Parts(b"c" * 32, b"s" * 32, "client", "server")


def test_proof_depends_on_everything():
    proofs = {
        auth.prove(KEY, auth.SERVER_LABEL, PARTS),
        auth.prove(KEY, auth.CLIENT_LABEL, PARTS),
        auth.prove(b"l" * 32, auth.SERVER_LABEL, PARTS),
        auth.prove(KEY, auth.SERVER_LABEL, PARTS._replace(client_nonce=b"d" * 32)),
        auth.prove(KEY, auth.SERVER_LABEL, PARTS._replace(server_nonce=b"d" * 32)),
        auth.prove(
            KEY, auth.SERVER_LABEL, PARTS._replace(client_engine_id="clien", server_engine_id="tserver")
        ),
        auth.prove(KEY, auth.SERVER_LABEL, PARTS._replace(server_engine_id="other")),
    }
    assert len(proofs) == 7
    assert {len(proof) for proof in proofs} == {auth.PROOF_BYTES}


def test_nonces_differ():
    assert len({auth.new_nonce() for _ in range(100)}) == 100


def test_key_file_is_read_without_white_space(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    assert auth.read_transfer_key(path) == KEY


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read .* mount the object's transfer Secret"),
        (b"short\n", "has 5 bytes and needs at least 16"),
    ],
)
def test_bad_key_file_is_named_with_its_remedy(tmp_path, content, message):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        auth.read_transfer_key(path)


@pytest.mark.parametrize(
    ("host", "client", "endpoint"),
    [("127.0.0.1", "127.0.0.1", "127.0.0.1:81"), ("::1", "::1", "[::1]:81"), ("::", "127.0.0.1", "[::]:81")],
)
def test_server_listens_on_either_family(host, client, endpoint):
    with listen(host, 0) as listener:
        socket.create_connection((client, listener.getsockname()[1]), timeout=2).close()
    assert format_endpoint(host, 81) == endpoint


def sample(*, to_node="b", num_bytes=1 << 20, busy_s=0.5):
    return LinkSample(
        from_node="a", to_node=to_node, from_pod="p", to_pod="d", transport="TCP",
        bytes=num_bytes, busy_s=busy_s, age_s=0,
    )  # fmt: skip


def test_link_samples_age_and_go():
    book = LinkBook()
    book.record(sample(), 100.0)
    assert [one.age_s for one in book.samples(103.0)] == [3.0]
    assert book.samples(100.0 + MAX_AGE_S + 1) == []


def test_newest_samples_of_each_link_are_kept_newest_first():
    book = LinkBook()
    for number in range(SAMPLES_PER_LINK + 4):
        book.record(sample(num_bytes=(1 << 20) + number), float(number))
    kept = [one.bytes - (1 << 20) for one in book.samples(20.0)]
    assert kept == list(range(SAMPLES_PER_LINK + 3, 3, -1))


def test_number_of_links_is_bounded():
    book = LinkBook()
    for number in range(MAX_LINKS + 10):
        book.record(sample(to_node=f"n{number}"), 0.0)
    assert len(book.samples(0.0)) == MAX_LINKS


@pytest.mark.parametrize("bad", [sample(num_bytes=100), sample(busy_s=0.0)])
def test_samples_that_say_nothing_are_dropped(bad):
    book = LinkBook()
    book.record(bad, 0.0)
    assert book.samples(0.0) == []


def test_quarantine_doubles_and_ends():
    quarantine = Quarantine()
    now_s = 0.0
    rests = []
    for _ in range(9):
        quarantine.failed("p", TransferFailure.CONNECT, now_s)
        rest_s = quarantine.resting(now_s).get("p", 0.0)
        rests.append(rest_s)
        now_s += rest_s
    assert rests == [0, 0, 2, 4, 8, 16, 30, 30, 30]
    assert rests[-1] == LONGEST_QUARANTINE_S
    quarantine.check("p", now_s)
    quarantine.check("q", 0.0)
    quarantine.succeeded("p")
    quarantine.failed("p", TransferFailure.CONNECT, now_s)
    assert quarantine.resting(now_s) == {}


def test_quarantined_pair_says_why():
    quarantine = Quarantine()
    for _ in range(3):
        quarantine.failed("p", TransferFailure.CHECKSUM, 10.0)
    with pytest.raises(TransferError, match=r"pulls from p rest for 1\.5 s after 3 failures") as caught:
        quarantine.check("p", 10.5)
    assert caught.value.reason is TransferFailure.CHECKSUM


def test_failures_of_one_request_do_not_rest_the_pair():
    quarantine = Quarantine()
    for reason in set(TransferFailure) - PAIR_FAILURES:
        for _ in range(5):
            quarantine.failed("p", reason, 0.0)
    assert quarantine.resting(0.0) == {}


def test_restarted_peer_starts_afresh():
    quarantine = Quarantine()
    for _ in range(4):
        quarantine.failed("p", TransferFailure.CONNECT, 0.0)
    quarantine.failed("p", TransferFailure.ENGINE_ID, 0.0)
    assert quarantine.resting(0.0) == {}


def test_number_of_remembered_pairs_is_bounded():
    quarantine = Quarantine()
    for number in range(MAX_PEERS + 50):
        for _ in range(3):
            quarantine.failed(f"p{number}", TransferFailure.CONNECT, 0.0)
    assert len(quarantine.resting(0.0)) == MAX_PEERS


@pytest.fixture
def channels():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    pair = Channel(client), Channel(server)
    yield pair
    for channel in pair:
        channel.close()


def limits(seconds=5.0, silence_s=5.0, cancellation=None):
    return Limits(
        deadline=time.monotonic() + seconds,
        silence_s=silence_s,
        is_cancelled=(cancellation or Cancellation()).is_set,
    )


def test_cancel_wakes_a_blocked_receive_at_once(channels):
    client, _ = channels
    cancellation = Cancellation()
    child = Cancellation(cancellation)
    threading.Timer(0.05, cancellation.cancel).start()
    started = time.monotonic()
    with pytest.raises(TransferError) as caught, child.guarding(client):
        client.receive(limits(cancellation=child), max_header_bytes=100)
    assert caught.value.reason is TransferFailure.CANCELLED
    assert time.monotonic() - started < 1


def test_cancelled_child_leaves_its_parent_alone(channels):
    parent = Cancellation()
    child = Cancellation(parent)
    child.cancel()
    assert child.is_set()
    assert not parent.is_set()
    with pytest.raises(TransferError), child.guarding(channels[0]):
        pass
    with parent.guarding(channels[0]):
        pass


@pytest.mark.parametrize(
    ("seconds", "silence_s", "reason"),
    [(0.15, 5.0, TransferFailure.TIMEOUT), (5.0, 0.15, TransferFailure.PROGRESS)],
)
def test_waits_are_bounded(channels, seconds, silence_s, reason):
    started = time.monotonic()
    with pytest.raises(TransferError) as caught:
        channels[0].receive(limits(seconds, silence_s), max_header_bytes=100)
    assert caught.value.reason is reason
    assert time.monotonic() - started < 1


def test_sender_does_not_wait_for_ever_for_a_reader(channels):
    payload = [memoryview(bytes(1 << 20))] * 64
    with pytest.raises(TransferError) as caught:
        channels[0].send(Heartbeat(num_ready_blocks=0), limits(silence_s=0.3), payload)
    assert caught.value.reason is TransferFailure.PROGRESS


def test_scattered_buffers_arrive_in_order(channels):
    client, server = channels
    sent = [memoryview(bytes([number]) * (100_000 + number)) for number in range(40)]
    sending = threading.Thread(target=client.send, args=(Heartbeat(num_ready_blocks=3), limits(), sent))
    sending.start()
    total = sum(view.nbytes for view in sent)
    frame = server.receive(limits(), max_header_bytes=100, max_payload_bytes=total)
    assert (frame.message, frame.payload_bytes) == (Heartbeat(num_ready_blocks=3), total)
    received = [memoryview(bytearray(view.nbytes)) for view in sent]
    server.receive_into(received, limits())
    sending.join()
    assert received == sent


def test_kept_connection_is_quiet_until_the_peer_speaks_or_leaves(channels):
    client, server = channels
    assert client.is_quiet()
    server.close()
    time.sleep(0.05)
    assert not client.is_quiet()

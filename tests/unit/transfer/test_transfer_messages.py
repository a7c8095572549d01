"""The protocol's bytes: round trips, frames kept from version 1, and everything that is refused."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_transfer import LAYOUT
from phasesplit.api.manifest import KVManifest, ManifestState
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.messages import (
    KINDS,
    MAGIC,
    MAX_SMALL_HEADER_BYTES,
    PREFIX,
    Blocks,
    Challenge,
    Error,
    Final,
    Heartbeat,
    Hello,
    Kind,
    Manifest,
    Probe,
    ProbeData,
    Proof,
    Pull,
    Release,
    decode_header,
    decode_prefix,
    encode,
)

MANIFEST = KVManifest(
    request_id="r-1",
    model_fingerprint="f",
    kv_layout=LAYOUT,
    token_ids_hash=("00" * 16, "11" * 16),
    num_tokens=7,
    num_ready_tokens=7,
    first_token=42,
    sampling_state={"seed": 3, "position": 7},
    blocks=(5, 9),
    bytes=2048,
    checksums=("a" * 16, "b" * 16),
    engine_id="e",
    endpoint="10.0.0.1:8100",
    state=ManifestState.READY,
    age_s=0.5,
    expires_in_s=29.5,
)
MESSAGES = [
    Hello(nonce=b"c" * 32, engine_id="decode", pod="d-0", node="n1"),
    Challenge(nonce=b"s" * 32, proof=b"p" * 32, engine_id="prefill", pod="p-0", node="n2"),
    Proof(proof=b"q" * 32),
    Pull(request_id="r-1", engine_id="prefill", model_fingerprint="f", first_block=1, num_blocks=2,
         stream=1, num_streams=2, group_blocks=8),
    Manifest(manifest=MANIFEST),
    Blocks(first_block=1, checksums=("b" * 16,), waited_s=0.25),
    Heartbeat(num_ready_blocks=1),
    Final(manifest=MANIFEST, finished_age_s=0.125, waited_s=0.5),
    Release(request_id="r-1", pulled=True),
    Error(reason="expired", message="the KV of request r-1 is expired on the prefill worker"),
    Probe(num_bytes=4 << 20),
    ProbeData(),
]  # fmt: skip

# Bytes that version 1 wrote for MESSAGES. They are never edited: a change of the code that cannot
# read them any more is a new version of the protocol, with its own frames beside these.
FRAMES_V1 = [
    "50534b56010100000000004a000000000000000084a56e6f6e6365c42063636363636363636363636363636363636363"
    "63636363636363636363636363a9656e67696e655f6964a66465636f6465a3706f64a3642d30a46e6f6465a26e31",
    "50534b560102000000000073000000000000000085a56e6f6e6365c42073737373737373737373737373737373737373"
    "73737373737373737373737373a570726f6f66c420707070707070707070707070707070707070707070707070707070"
    "7070707070a9656e67696e655f6964a770726566696c6ca3706f64a3702d30a46e6f6465a26e32",
    "50534b560103000000000029000000000000000081a570726f6f66c42071717171717171717171717171717171717171"
    "71717171717171717171717171",
    "50534b560104000000000072000000000000000088aa726571756573745f6964a3722d31a9656e67696e655f6964a770"
    "726566696c6cb16d6f64656c5f66696e6765727072696e74a166ab66697273745f626c6f636b01aa6e756d5f626c6f63"
    "6b7302a673747265616d01ab6e756d5f73747265616d7302ac67726f75705f626c6f636b7308",
    "50534b5601050000000001c5000000000000000081a86d616e6966657374de0012a776657273696f6e01aa7265717565"
    "73745f6964a3722d31b16d6f64656c5f66696e6765727072696e74a166a96b765f6c61796f757485aa6e756d5f6c6179"
    "65727302ac6e756d5f6b765f686561647302a8686561645f64696d08aa626c6f636b5f73697a6504a56474797065a766"
    "6c6f61743332ae746f6b656e5f6964735f6861736892d920303030303030303030303030303030303030303030303030"
    "3030303030303030d9203131313131313131313131313131313131313131313131313131313131313131aa6e756d5f74"
    "6f6b656e7307b06e756d5f72656164795f746f6b656e7307ab66697273745f746f6b656e2aae73616d706c696e675f73"
    "7461746582a47365656403a8706f736974696f6e07a6626c6f636b73920509a56279746573cd0800a9636865636b7375"
    "6d7392b061616161616161616161616161616161b062626262626262626262626262626262a9656e67696e655f6964a1"
    "65a8656e64706f696e74ad31302e302e302e313a38313030aa7472616e73706f72747391a3544350a57374617465a572"
    "65616479a56167655f73cb3fe0000000000000ac657870697265735f696e5f73cb403d800000000000",
    "50534b56010600000000003c000000000000080083ab66697273745f626c6f636b01a9636865636b73756d7391b06262"
    "6262626262626262626262626262a87761697465645f73cb3fd0000000000000",
    "50534b560107000000000013000000000000000081b06e756d5f72656164795f626c6f636b7301",
    "50534b5601080000000001ef000000000000000083a86d616e6966657374de0012a776657273696f6e01aa7265717565"
    "73745f6964a3722d31b16d6f64656c5f66696e6765727072696e74a166a96b765f6c61796f757485aa6e756d5f6c6179"
    "65727302ac6e756d5f6b765f686561647302a8686561645f64696d08aa626c6f636b5f73697a6504a56474797065a766"
    "6c6f61743332ae746f6b656e5f6964735f6861736892d920303030303030303030303030303030303030303030303030"
    "3030303030303030d9203131313131313131313131313131313131313131313131313131313131313131aa6e756d5f74"
    "6f6b656e7307b06e756d5f72656164795f746f6b656e7307ab66697273745f746f6b656e2aae73616d706c696e675f73"
    "7461746582a47365656403a8706f736974696f6e07a6626c6f636b73920509a56279746573cd0800a9636865636b7375"
    "6d7392b061616161616161616161616161616161b062626262626262626262626262626262a9656e67696e655f6964a1"
    "65a8656e64706f696e74ad31302e302e302e313a38313030aa7472616e73706f72747391a3544350a57374617465a572"
    "65616479a56167655f73cb3fe0000000000000ac657870697265735f696e5f73cb403d800000000000ae66696e697368"
    "65645f6167655f73cb3fc0000000000000a87761697465645f73cb3fe0000000000000",
    "50534b560109000000000018000000000000000082aa726571756573745f6964a3722d31a670756c6c6564c3",
    "50534b56010a000000000050000000000000000082a6726561736f6ea765787069726564a76d657373616765d9367468"
    "65204b56206f66207265717565737420722d312069732065787069726564206f6e207468652070726566696c6c20776f"
    "726b6572",
    "50534b56010b000000000010000000000000000081a96e756d5f6279746573ce00400000",
    "50534b56010c000000000001000000000000000080",
]


def decode(data: bytes, *, max_header_bytes: int = MAX_SMALL_HEADER_BYTES, max_payload_bytes: int = 1 << 20):
    prefix = decode_prefix(
        data[: PREFIX.size], max_header_bytes=max_header_bytes, max_payload_bytes=max_payload_bytes
    )
    return decode_header(prefix.kind, data[PREFIX.size : PREFIX.size + prefix.header_bytes])


def refusal(data: bytes, **bounds: int) -> TransferFailure:
    with pytest.raises(TransferError) as caught:
        decode(data, **bounds)
    return caught.value.reason


def test_every_kind_has_an_example():
    assert {KINDS[type(message)] for message in MESSAGES} == set(Kind)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("frame", "message"),
    list(zip(FRAMES_V1, MESSAGES, strict=True)),
    ids=[type(message).__name__ for message in MESSAGES],
)
def test_version_1_is_still_read(frame, message):
    assert decode(bytes.fromhex(frame)) == message


def test_fields_of_a_newer_peer_are_ignored():
    header = msgpack.packb({"num_ready_blocks": 3, "mood": "good"})
    assert decode_header(Kind.HEARTBEAT, header) == Heartbeat(num_ready_blocks=3)


def test_payload_length_is_announced():
    frame = encode(Blocks(first_block=0, checksums=("0" * 16,)), payload_bytes=1024)
    prefix = decode_prefix(frame[: PREFIX.size], max_header_bytes=4096, max_payload_bytes=1024)
    assert (prefix.kind, prefix.payload_bytes) == (Kind.BLOCKS, 1024)


BAD_PREFIXES = {
    "magic": (b"HTTP", 1, Kind.HELLO, 0, 0, TransferFailure.PROTOCOL),
    "version": (MAGIC, 2, Kind.HELLO, 0, 0, TransferFailure.PROTOCOL),
    "kind": (MAGIC, 1, 0, 0, 0, TransferFailure.PROTOCOL),
    "header": (MAGIC, 1, Kind.HELLO, 1025, 0, TransferFailure.TOO_LARGE),
    "payload": (MAGIC, 1, Kind.BLOCKS, 0, 2049, TransferFailure.TOO_LARGE),
    "whole memory": (MAGIC, 1, Kind.BLOCKS, 2**32 - 1, 2**64 - 1, TransferFailure.TOO_LARGE),
}


@pytest.mark.parametrize("fields", BAD_PREFIXES.values(), ids=BAD_PREFIXES.keys())
def test_bad_prefix_is_refused_by_name(fields):
    magic, version, kind, header_bytes, payload_bytes, reason = fields
    data = PREFIX.pack(magic, version, kind, 0, header_bytes, payload_bytes)
    with pytest.raises(TransferError) as caught:
        decode_prefix(data, max_header_bytes=1024, max_payload_bytes=2048)
    assert caught.value.reason is reason


def test_refused_version_names_both():
    frame = PREFIX.pack(MAGIC, 9, Kind.HELLO, 0, 0, 0)
    with pytest.raises(TransferError, match=r"version 9 .* version 1; run the same worker image"):
        decode_prefix(frame, max_header_bytes=0)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_truncated_header_is_refused(message):
    frame = encode(message)
    header = frame[PREFIX.size :]
    kind = KINDS[type(message)]
    for length in range(len(header)):
        with pytest.raises(TransferError) as caught:
            decode_header(kind, header[:length])
        assert caught.value.reason is TransferFailure.PROTOCOL


@given(st.sampled_from(Kind), st.binary(max_size=300))
def test_random_header_is_read_or_refused(kind, data):
    try:
        message = decode_header(kind, data)
    except TransferError as error:
        assert error.reason is TransferFailure.PROTOCOL
    else:
        assert KINDS[type(message)] is kind


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({name for message in MESSAGES for name in type(message).model_fields})


@given(st.sampled_from(Kind), st.dictionaries(st.sampled_from(FIELDS), values, max_size=8))
def test_plausible_header_is_read_or_refused(kind, fields):
    try:
        decode_header(kind, msgpack.packb(fields))
    except TransferError as error:
        assert error.reason is TransferFailure.PROTOCOL


def test_deeply_nested_header_is_refused():
    assert refusal(PREFIX.pack(MAGIC, 1, Kind.HELLO, 0, 5000, 0) + b"\x91" * 5000) is TransferFailure.PROTOCOL


def test_unknown_reason_of_a_newer_peer_is_a_protocol_error():
    assert Error(reason="moon phase", message="m").to_exception().reason is TransferFailure.PROTOCOL
    assert Error(reason="expired").to_exception().reason is TransferFailure.EXPIRED

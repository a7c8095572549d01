"""Flags of `phasesplit-worker`: all of them parse, wrong ones are refused in one sentence."""

from dataclasses import fields
from pathlib import Path

import pytest

from phasesplit.api.names import Pool, Role
from phasesplit_worker.config import WorkerConfig, parse_args
from phasesplit_worker.errors import ConfigError

REQUIRED = [
    "--model-path",
    "/m",
    "--model-name",
    "n",
    "--object",
    "o",
    "--namespace",
    "ns",
    "--pool",
    "decode",
]


def test_defaults() -> None:
    config = parse_args(REQUIRED, {})
    assert config.pool is Pool.DECODE and config.role is Role.COLOCATED
    assert (config.block_size, config.port, config.transfer_port) == (16, 8000, 8100)
    assert config.max_batched_tokens is None and config.tpot_target_s is None
    assert config.pod_ip == "127.0.0.1" and config.pod_name == config.node_name != ""


def test_every_flag() -> None:
    flags = (
        "--role prefill --dtype bfloat16 --device cuda --block-size 32 --kv-memory-fraction 0.5 "
        "--kv-cache-bytes 1000 --max-model-length 900 --max-batched-tokens 128 --tpot-target-ms 250 "
        "--max-num-seqs 3 --host 127.0.0.1 --port 1 --transfer-port 2 --transfer-deadline-s 4.5 --kv-ttl-s 7 "
        "--drain-s 9 --transfer-key-file /k --admin-token-file /t --pace /p --model-cache /c "
        "--model-revision r"
    )
    environ = {"POD_NAME": "p", "NODE_NAME": "n", "POD_IP": "10.0.0.1", "HF_TOKEN": "secret"}
    config = parse_args([*REQUIRED, *flags.split()], environ)
    assert config.tpot_target_s == 0.25 and config.pace_file == Path("/p")
    unset = {field.name for field in fields(WorkerConfig) if getattr(config, field.name) is None}
    assert unset == {"model_repository"}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--role", "none"], "--role"),
        (["--block-size", "0"], "out of range"),
        (["--kv-memory-fraction", "1.5"], "between 0.01 and 1.0"),
        (["--port", "x"], "--port"),
        (["--tpot-target-ms", "nan"], "not a finite number"),
        (["--model-repository", "a/b"], "not allowed with"),
        (["--unknown"], "unrecognized"),
        (["--max-num", "4"], "unrecognized"),
    ],
)
def test_wrong_flags_are_refused_with_a_sentence(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_args([*REQUIRED, *flags], {})


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="--model-path"):
        parse_args(REQUIRED[2:], {})

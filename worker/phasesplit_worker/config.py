"""Flags and environment of `phasesplit-worker`, parsed once into a frozen `WorkerConfig`.

Knows names, ranges and defaults. Does not know torch, files' contents or what a model needs.
"""

import argparse
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasesplit.api.command_line import FlagError, FlagParser
from phasesplit.api.names import WORKER_API_PORT, WORKER_TRANSFER_PORT, Pool, Role
from phasesplit_worker.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a worker process is told at its start. Never changed afterwards."""

    model_name: str  # name in the OpenAI API
    object_name: str
    namespace: str
    pool: Pool
    model_path: Path | None = None  # exactly one of model_path and model_repository
    model_repository: str | None = None
    model_revision: str | None = None
    model_cache: Path | None = None
    role: Role = Role.COLOCATED
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16  # tokens
    kv_memory_fraction: float = 0.9  # of the memory left after the weights
    kv_cache_bytes: int | None = None  # overrides kv_memory_fraction
    max_model_length: int | None = None  # tokens; None: what the model was trained for
    max_batched_tokens: int | None = None  # None: derived from tpot_target_s
    tpot_target_s: float | None = None
    max_num_seqs: int = 64
    host: str = "0.0.0.0"  # noqa: S104 a pod has a network of its own
    port: int = WORKER_API_PORT
    transfer_port: int = WORKER_TRANSFER_PORT
    transfer_deadline_s: float | None = None  # None: derived from the size and the link
    kv_ttl_s: float = 30.0
    drain_s: float = 120.0
    transfer_key_file: Path | None = None
    admin_token_file: Path | None = None
    pace_file: Path | None = None  # a StepProfile as JSON
    pod_name: str = "localhost"
    node_name: str = "localhost"
    pod_ip: str = "127.0.0.1"
    hf_token: str | None = None


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> WorkerConfig:
    """Parse flags (without the program name) and the downward-API environment.

    Raises ConfigError with one sentence; `--help` exits through SystemExit as usual.
    """
    try:
        values = vars(_build_parser().parse_args(list(argv)))
    except FlagError as error:
        raise ConfigError(str(error)) from error
    tpot_target_ms = values.pop("tpot_target_ms")
    hostname = socket.gethostname()
    return WorkerConfig(
        **values,
        tpot_target_s=None if tpot_target_ms is None else tpot_target_ms / 1000,
        pod_name=environ.get("POD_NAME") or hostname,
        node_name=environ.get("NODE_NAME") or hostname,
        pod_ip=environ.get("POD_IP") or "127.0.0.1",
        hf_token=environ.get("HF_TOKEN") or None,
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        "phasesplit-worker", "Serve one language model as a member of a prefill or decode pool."
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-path", type=Path, metavar="PATH", help="directory with the model's files")
    source.add_argument("--model-repository", metavar="REPOSITORY", help="Hugging Face repository")
    add("--model-revision", metavar="REVISION", help="branch, tag or commit of the repository")
    add("--model-cache", type=Path, metavar="DIR", help="where downloaded models are kept")
    add("--model-name", required=True, metavar="NAME", help="name of the model in the OpenAI API")
    add("--object", dest="object_name", required=True, metavar="NAME", help="DisaggregatedModel it serves")
    add("--namespace", required=True, metavar="NAMESPACE", help="namespace of that object")
    add("--pool", type=Pool, choices=list(Pool), required=True, help="pool this worker belongs to")
    add("--role", type=Role, choices=list(Role), default=Role.COLOCATED, help="first role")
    add("--dtype", choices=DTYPES, default="auto", help="type of weights and KV cache")
    add("--device", choices=DEVICES, default="cpu", help="where the model runs")
    add("--block-size", type=_integer(1, 1024), default=16, metavar="TOKENS", help="tokens per KV block")
    add("--kv-memory-fraction", type=_number(0.01, 1.0), default=0.9, metavar="FRACTION",
        help="share of the memory left after the weights that KV may take")  # fmt: skip
    add(
        "--kv-cache-bytes",
        type=_integer(1),
        metavar="BYTES",
        help="size of the KV cache, overrides the share",
    )
    add("--max-model-length", type=_integer(2), metavar="TOKENS", help="longest prompt plus answer")
    add("--max-batched-tokens", type=_integer(1), metavar="TOKENS",
        help="prompt tokens per colocated step; derived from the TPOT target when left out")  # fmt: skip
    add("--tpot-target-ms", type=_number(0.001), metavar="MS", help="tightest time per output token")
    add("--max-num-seqs", type=_integer(1, 4096), default=64, metavar="N", help="sequences running at once")
    add("--host", default="0.0.0.0", metavar="ADDRESS", help="address to listen on")  # noqa: S104 a pod's own network
    add("--port", type=_integer(0, 65535), default=WORKER_API_PORT, metavar="PORT", help="API port")
    add("--transfer-port", type=_integer(0, 65535), default=WORKER_TRANSFER_PORT, metavar="PORT",
        help="KV transfer port")  # fmt: skip
    add("--transfer-deadline-s", type=_number(0.001), metavar="S", help="longest whole KV transfer")
    add("--kv-ttl-s", type=_number(0.1), default=30.0, metavar="S", help="how long unpulled KV is kept")
    add("--drain-s", type=_number(0.0), default=120.0, metavar="S", help="longest drain after SIGTERM")
    add("--transfer-key-file", type=Path, metavar="FILE", help="HMAC key of the KV protocol")
    add("--admin-token-file", type=Path, metavar="FILE", help="bearer token of /admin and /v1/kv")
    add("--pace", dest="pace_file", type=Path, metavar="PROFILE.json",
        help="stretch each step to the duration that this step profile declares")  # fmt: skip
    return parser


def _integer(minimum: int, maximum: int | None = None) -> Any:
    def integer(text: str) -> int:
        value = int(text)
        _check_range(value, minimum, maximum)
        return value

    return integer


def _number(minimum: float, maximum: float | None = None) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
        _check_range(value, minimum, maximum)
        return value

    return number


def _check_range(value: float, minimum: float, maximum: float | None) -> None:
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise argparse.ArgumentTypeError(f"{value} is out of range, use {allowed}")

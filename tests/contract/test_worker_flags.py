"""What the builders render is what the worker parses, for every sample."""

from pathlib import Path

import pytest

from helpers_resources import build_context, read_sample, sample_names
from phasesplit.api.flags import OWNED_FLAGS
from phasesplit.api.names import WORKER_API_PORT, WORKER_TRANSFER_PORT, Pool, Role
from phasesplit.resources.context import BuildContext
from phasesplit.resources.worker_args import build_worker_args
from phasesplit_worker import config as worker_config
from phasesplit_worker.config import WorkerConfig, parse_args

# Flags that a user may set in spec.engine.args.
FREE_FLAGS = {"--max-num-seqs", "--kv-cache-bytes", "--kv-ttl-s", "--pace"}
ENVIRONMENT = {"POD_NAME": "chat-prefill-0", "NODE_NAME": "a", "POD_IP": "10.0.0.1"}


def context_of(sample: str) -> BuildContext:
    document = read_sample(sample)
    return build_context(document["spec"], document["metadata"]["name"])


def parse(context: BuildContext, pool: Pool) -> WorkerConfig:
    return parse_args(build_worker_args(context, pool), ENVIRONMENT)


@pytest.mark.parametrize("pool", list(Pool))
@pytest.mark.parametrize("sample", sample_names())
def test_worker_reads_what_the_spec_says(sample: str, pool: Pool) -> None:
    context = context_of(sample)
    spec, config = context.spec, parse(context, pool)
    assert config.model_name == context.model_name
    assert (config.object_name, config.namespace, config.pool) == (context.name, context.namespace, pool)
    assert config.role is Role.COLOCATED
    assert config.device == ("cuda" if spec.pool(pool).gpu.count else "cpu")
    assert config.dtype == (spec.model.dtype.lower() if spec.model.dtype else "auto")
    assert config.block_size == spec.engine.block_size
    assert config.kv_memory_fraction == spec.engine.kv_memory_fraction
    assert config.max_model_length == spec.model.max_model_length
    assert config.max_batched_tokens == spec.colocated.max_batched_tokens
    assert config.tpot_target_s == min(target.tpot_milliseconds for target in spec.slo) / 1000
    assert (config.port, config.transfer_port) == (WORKER_API_PORT, WORKER_TRANSFER_PORT)
    deadline = spec.transfer.deadline_milliseconds
    assert config.transfer_deadline_s == (None if deadline is None else deadline / 1000)
    assert config.drain_s == spec.rollout.drain_seconds
    assert config.transfer_key_file == Path("/etc/phasesplit/transfer/transfer-key")
    assert config.admin_token_file == Path("/etc/phasesplit/transfer/admin-token")


@pytest.mark.parametrize(
    ("source", "path", "repository"),
    [
        ({"path": "/models/m"}, Path("/models/m"), None),
        ({"volume": {"claimName": "c", "path": "a/b/"}}, Path("/model/a/b"), None),
        ({"huggingFace": {"repository": "a/b", "revision": "v1"}}, None, "a/b"),
    ],
)
def test_model_source(source: dict[str, object], path: Path | None, repository: str | None) -> None:
    config = parse(build_context({"model": {"source": source}}), Pool.DECODE)
    assert (config.model_path, config.model_repository) == (path, repository)
    if repository is not None:
        assert (config.model_revision, config.model_cache) == ("v1", Path("/cache"))


def test_bounds_of_the_schema_are_inside_those_of_the_flags() -> None:
    edges = [
        {"engine": {"blockSize": 1, "kvMemoryFraction": 0.01}, "rollout": {"drainSeconds": 0}},
        {"engine": {"blockSize": 256, "kvMemoryFraction": 1}, "slo": [{"name": "a", "tpotMilliseconds": 1}]},
        {"transfer": {"deadlineMilliseconds": 100}, "colocated": {"maxBatchedTokens": 8}},
        {"transfer": {"deadlineMilliseconds": 600_000}, "colocated": {"maxBatchedTokens": 1_048_576}},
    ]
    for edge in edges:
        parse(build_context(edge), Pool.PREFILL)


def test_users_flags_are_passed_on() -> None:
    config = parse(build_context({"engine": {"args": ["--max-num-seqs", "7", "--kv-ttl-s=3"]}}), Pool.PREFILL)
    assert (config.max_num_seqs, config.kv_ttl_s) == (7, 3.0)


def test_every_flag_is_owned_or_free() -> None:
    """A flag that is added to the worker must be given to the operator or to the user."""
    parser = worker_config._build_parser()
    flags = {
        option for action in parser._actions for option in action.option_strings if option.startswith("--")
    }
    assert flags - {"--help"} == set(OWNED_FLAGS) | FREE_FLAGS


def test_environment_is_what_the_worker_reads() -> None:
    context = build_context()
    config = parse(context, Pool.PREFILL)
    assert (config.pod_name, config.node_name, config.pod_ip) == ("chat-prefill-0", "a", "10.0.0.1")

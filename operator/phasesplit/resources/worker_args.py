"""The worker's command line, rendered from the spec. The contract test parses it back."""

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.resources.context import BuildContext

MODEL_MOUNT = "/model"
CACHE_MOUNT = "/cache"
TRANSFER_MOUNT = "/etc/phasesplit/transfer"
API_KEYS_MOUNT = "/etc/phasesplit/api-keys"


def build_worker_args(context: BuildContext, pool: Pool) -> list[str]:
    """Arguments of `phasesplit-worker`; the user's come last."""
    spec = context.spec
    args = [
        *_model_args(spec),
        *("--model-name", context.model_name),
        *("--object", context.name),
        *("--namespace", context.namespace),
        *("--pool", str(pool)),
        *("--device", "cuda" if spec.pool(pool).gpu.count > 0 else "cpu"),
        *("--block-size", str(spec.engine.block_size)),
        *("--kv-memory-fraction", str(spec.engine.kv_memory_fraction)),
        *("--tpot-target-ms", str(min(target.tpot_milliseconds for target in spec.slo))),
        *("--port", str(names.WORKER_API_PORT)),
        *("--transfer-port", str(names.WORKER_TRANSFER_PORT)),
        *("--drain-s", str(spec.rollout.drain_seconds)),
        *("--transfer-key-file", f"{TRANSFER_MOUNT}/{names.SECRET_KEY_TRANSFER}"),
        *("--admin-token-file", f"{TRANSFER_MOUNT}/{names.SECRET_KEY_ADMIN}"),
    ]
    if spec.model.dtype is not None:
        args += ["--dtype", spec.model.dtype.lower()]
    if spec.model.max_model_length is not None:
        args += ["--max-model-length", str(spec.model.max_model_length)]
    if spec.colocated.max_batched_tokens is not None:
        args += ["--max-batched-tokens", str(spec.colocated.max_batched_tokens)]
    if spec.transfer.deadline_milliseconds is not None:
        args += ["--transfer-deadline-s", str(spec.transfer.deadline_milliseconds / 1000)]
    return [*args, *spec.engine.args]


def build_router_args(context: BuildContext) -> list[str]:
    """Arguments of `phasesplit-router`."""
    args = [
        *("--object", context.name),
        *("--namespace", context.namespace),
        *("--port", str(names.ROUTER_API_PORT)),
        *("--drain-s", str(max(1, context.spec.rollout.drain_seconds))),
        *("--admin-token-file", f"{TRANSFER_MOUNT}/{names.SECRET_KEY_ADMIN}"),
    ]
    if context.spec.router.api_keys_secret_ref is not None:
        args += ["--api-keys-dir", API_KEYS_MOUNT]
    return args


def _model_args(spec: DisaggregatedModelSpec) -> list[str]:
    source = spec.model.source
    if source.path is not None:
        return ["--model-path", source.path]
    if source.volume is not None:
        return ["--model-path", f"{MODEL_MOUNT}/{source.volume.path.strip('/')}".rstrip("/")]
    if source.hugging_face is None:
        raise ValueError("spec.model.source has no source; validate the spec before building")
    hub = source.hugging_face
    return [
        "--model-repository",
        hub.repository,
        "--model-revision",
        hub.revision,
        "--model-cache",
        CACHE_MOUNT,
    ]

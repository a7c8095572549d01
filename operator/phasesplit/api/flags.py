"""Worker flags that the operator renders itself, and where the user says the same thing instead."""

OWNED_FLAGS: dict[str, str] = {
    "--model-path": "spec.model.source",
    "--model-repository": "spec.model.source",
    "--model-revision": "spec.model.source.huggingFace.revision",
    "--model-cache": "spec.model.cache",
    "--model-name": "spec.model.name",
    "--max-model-length": "spec.model.maxModelLength",
    "--dtype": "spec.model.dtype",
    "--object": "metadata.name",
    "--namespace": "metadata.namespace",
    "--pool": "spec.prefill and spec.decode",
    "--role": "spec.mode",
    "--device": "spec.prefill.gpu.count and spec.decode.gpu.count",
    "--block-size": "spec.engine.blockSize",
    "--kv-memory-fraction": "spec.engine.kvMemoryFraction",
    "--max-batched-tokens": "spec.colocated.maxBatchedTokens",
    "--tpot-target-ms": "spec.slo",
    "--transfer-deadline-s": "spec.transfer.deadlineMilliseconds",
    "--drain-s": "spec.rollout.drainSeconds",
    "--host": "nothing: workers listen on every address",
    "--port": "nothing: the port is fixed",
    "--transfer-port": "nothing: the port is fixed",
    "--transfer-key-file": "nothing: the operator makes the key",
    "--admin-token-file": "nothing: the operator makes the token",
}


def find_owned_flag(argument: str) -> str | None:
    """The owned flag that an argument sets, also when it is abbreviated or written with `=`."""
    flag = argument.split("=", 1)[0]
    if not flag.startswith("--") or len(flag) < 3:
        return None
    if flag in OWNED_FLAGS:
        return flag
    return next((owned for owned in OWNED_FLAGS if owned.startswith(flag)), None)

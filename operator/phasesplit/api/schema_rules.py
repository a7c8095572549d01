"""What the API server checks beyond types and bounds: CEL rules and list types of the schema.

Each rule has a sentence with field, value and remedy. `format` rather than `+`: the API server's
estimate of the cost of a concatenation has no bound. `validation.py` says the same in Python.
"""

from pydantic import JsonValue

from phasesplit.api.flags import OWNED_FLAGS

Extra = dict[str, JsonValue]

LIST_SET: Extra = {"x-kubernetes-list-type": "set"}


def list_map(key: str) -> Extra:
    """A list of objects that merges by this key."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def rules(*every: Extra) -> Extra:
    """Rules of one object or field."""
    return {"x-kubernetes-validations": list(every)}


def _rule(rule: str, message: str, expression: str | None = None) -> Extra:
    """`expression` makes the message with the refused value; `message` stands in for it."""
    both: Extra = {"rule": rule, "message": message}
    return both | ({"messageExpression": expression} if expression is not None else {})


_NUM_SOURCES = "(has(self.huggingFace) ? 1 : 0) + (has(self.volume) ? 1 : 0) + (has(self.path) ? 1 : 0)"
_ONE_OF = "set exactly one of huggingFace, volume and path"
ONE_SOURCE = _rule(
    f"{_NUM_SOURCES} == 1",
    f"spec.model.source must not have several sources or none; {_ONE_OF}",
    f"'spec.model.source has %d sources; {_ONE_OF}'.format([{_NUM_SOURCES}])",
)

CACHE_NEEDS_DOWNLOAD = _rule(
    "!has(self.cache) || has(self.source.huggingFace)",
    "spec.model.cache keeps downloads and needs spec.model.source.huggingFace; "
    "remove cache, the source is local already",
)

MIN_MAX = _rule(
    "self.min <= self.max",
    "replicas.min must not be above replicas.max; lower min or raise max",
    "'replicas.min is %d, above replicas.max %d; lower min or raise max'.format([self.min, self.max])",
)

# The API server compares a whole number with the integer part of `minimum`, so 0 would pass it.
FRACTION = _rule(
    "self >= 0.01", "spec.engine.kvMemoryFraction must lie between 0.01 and 1; set 0.9 or leave it out"
)

_IS_OWNED = "arg.matches('^(" + "|".join(OWNED_FLAGS) + ")(=|$)')"
_USE_FIELD = "which the operator sets itself; remove it and use the field of the spec"
OWNED_ARGS = _rule(
    f"!self.exists(arg, {_IS_OWNED})",
    f"spec.engine.args holds a flag {_USE_FIELD}",
    f"'spec.engine.args holds %s, {_USE_FIELD}'.format([self.filter(arg, {_IS_OWNED})])",
)


def _torch_gpus(pool: str) -> Extra:
    count = f"self.{pool}.gpu.count"
    remedy = "but the engine Torch takes 0 or 1; set it to 1 and raise replicas instead"
    return _rule(
        f"self.engine.type != 'Torch' || {count} <= 1",
        f"spec.{pool}.gpu.count must be 0 or 1 with the engine Torch",
        f"'spec.{pool}.gpu.count is %d, {remedy}'.format([{count}])",
    )


TORCH_PREFILL_GPUS = _torch_gpus("prefill")
TORCH_DECODE_GPUS = _torch_gpus("decode")

_LEAST_GPUS = " + ".join(
    f"self.{pool}.replicas.min * self.{pool}.gpu.count" for pool in ("prefill", "decode")
)
_LIMIT = "self.scaling.maxGPUs"
MAX_GPUS = _rule(
    f"!has({_LIMIT}) || {_LEAST_GPUS} <= {_LIMIT}",
    "spec.scaling.maxGPUs is below the GPUs that the pools' replicas.min need; raise maxGPUs or lower min",
    "'spec.scaling.maxGPUs is %d, but replicas.min of both pools need %d GPUs; raise maxGPUs or lower min'"
    f".format([{_LIMIT}, {_LEAST_GPUS}])",
)

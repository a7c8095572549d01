"""Objects that must be refused, with a part of the sentence that says why.

`by` says who refuses: the API server by schema or CEL, or the operator with Accepted=False.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from helpers_resources import MINIMAL
from phasesplit.api import names


@dataclass(frozen=True)
class BadObject:
    """A spec laid over the smallest one, and what its refusal says."""

    what: str
    spec: dict[str, Any]
    server_says: str | None  # part of the API server's message; None: it lets the object through
    operator_says: str  # part of the operator's sentence
    name: str = "bad"

    def manifest(self, namespace: str) -> dict[str, Any]:
        """The whole object."""
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": self.name, "namespace": namespace},
            "spec": deepcopy(MINIMAL | self.spec),
        }


HUB = {"repository": "a/b"}
WORKER = {"name": "worker"}

BAD_OBJECTS = [
    BadObject("no source", {"model": {"source": {}}}, "0 sources", "spec.model.source has 0 sources"),
    BadObject(
        "two sources",
        {"model": {"source": {"huggingFace": HUB, "path": "/m"}}},
        "2 sources; set exactly one",
        "spec.model.source has 2 sources",
    ),
    BadObject("no model", {"model": None}, "spec.model", "spec.model"),
    BadObject(
        "relative path",
        {"model": {"source": {"path": "m"}}},
        "spec.model.source.path",
        "spec.model.source.path",
    ),
    BadObject(
        "cache without download",
        {"model": {"source": {"path": "/m"}, "cache": {"storage": "1Gi"}}},
        "remove cache",
        "spec.model.cache",
    ),
    BadObject(
        "path out of the volume",
        {"model": {"source": {"volume": {"claimName": "c", "path": "../x"}}}},
        None,
        "which leaves the volume",
    ),
    BadObject(
        "min above max",
        {"prefill": {"replicas": {"min": 3, "max": 2}}},
        "replicas.min is 3, above replicas.max 2; lower min or raise max",
        "spec.prefill.replicas.min is 3, above spec.prefill.replicas.max 2",
    ),
    BadObject(
        "min above the default max",
        {"decode": {"replicas": {"min": 2}}},
        "replicas.min is 2, above replicas.max 1",
        "spec.decode.replicas.min is 2",
    ),
    BadObject(
        "two GPUs for Torch",
        {"decode": {"gpu": {"count": 2}}},
        "spec.decode.gpu.count is 2, but the engine Torch takes 0 or 1",
        "spec.decode.gpu.count is 2",
    ),
    BadObject(
        "limit below the minimum",
        {"prefill": {"replicas": {"min": 2, "max": 2}}, "scaling": {"maxGPUs": 2}},
        "spec.scaling.maxGPUs is 2, but replicas.min of both pools need 3 GPUs",
        "spec.scaling.maxGPUs is 2",
    ),
    BadObject(
        "engine that does not act", {"engine": {"type": "VLLM"}}, '"Torch"', "spec.engine.type is VLLM"
    ),
    BadObject(
        "unknown transport", {"transfer": {"transports": ["NIXL"]}}, '"TCP"', "spec.transfer.transports"
    ),
    BadObject("no transport", {"transfer": {"transports": []}}, "at least 1", "spec.transfer.transports"),
    BadObject("transport twice", {"transfer": {"transports": ["TCP", "TCP"]}}, "Duplicate", "TCP twice"),
    BadObject(
        "owned flag",
        {"engine": {"args": ["--max-num-seqs", "4", "--role=decode"]}},
        '"--role=decode"], which the operator sets itself',
        "--role is set by the operator from spec.mode",
    ),
    BadObject("owned flag cut short", {"engine": {"args": ["--transfer-p", "9"]}}, None, "--transfer-port"),
    BadObject(
        "target of zero",
        {"slo": [{"name": "a", "ttftMilliseconds": 0}]},
        "spec.slo[0].ttftMilliseconds",
        "spec.slo[0].ttftMilliseconds is 0",
    ),
    BadObject(
        "negative target",
        {"slo": [{"name": "a", "tpotMilliseconds": -5}]},
        "tpotMilliseconds",
        "tpotMilliseconds is -5",
    ),
    BadObject("class twice", {"slo": [{"name": "a"}, {"name": "a"}]}, "Duplicate", "spec.slo[].name is a"),
    BadObject("no class", {"slo": []}, "at least 1", "spec.slo"),
    BadObject("unknown mode", {"mode": "Both"}, "spec.mode", "spec.mode is Both"),
    BadObject(
        "block size 0", {"engine": {"blockSize": 0}}, "spec.engine.blockSize", "spec.engine.blockSize is 0"
    ),
    BadObject("fraction 0", {"engine": {"kvMemoryFraction": 0}}, "kvMemoryFraction", "kvMemoryFraction is 0"),
    BadObject("no quantity", {"prefill": {"gpu": {"minMemory": "much"}}}, "minMemory", "minMemory is much"),
    BadObject(
        "resources that are no quantity",
        {"decode": {"resources": {"requests": {"cpu": "two"}}}},
        None,
        "spec.decode.resources.requests[cpu] is two",
    ),
    BadObject(
        "GPUs said twice",
        {"decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        None,
        "set with spec.decode.gpu.count",
    ),
    BadObject(
        "flags of one pool",
        {"decode": {"template": {"spec": {"containers": [WORKER | {"args": ["--dtype", "float16"]}]}}}},
        None,
        "both pools need equal flags; use spec.engine.args",
    ),
    BadObject(
        "another program",
        {"decode": {"template": {"spec": {"containers": [WORKER | {"command": ["sh"]}]}}}},
        None,
        "use spec.engine.image",
    ),
    BadObject(
        "a patch directive",
        {"decode": {"template": {"spec": {"$patch": "replace"}}}},
        None,
        "a directive that overlays do not have",
    ),
    BadObject(
        "container without a name",
        {"decode": {"template": {"spec": {"containers": [{"image": "x"}]}}}},
        None,
        "has no name",
    ),
    BadObject(
        "gate in the template",
        {"prefill": {"template": {"spec": {"schedulingGates": [{"name": "x"}]}}}},
        None,
        "use spec.placement.binding",
    ),
    BadObject(
        "our label",
        {"prefill": {"template": {"metadata": {"labels": {"phasesplit.dev/pool": "decode"}}}}},
        None,
        "the operator knows its pods by it",
    ),
    BadObject(
        "name that is no Service name", {}, "metadata.name is 1chat", "metadata.name is 1chat", name="1chat"
    ),
    BadObject("name with a dot", {}, "metadata.name is a.b", "metadata.name is a.b", name="a.b"),
    BadObject("name of 45 characters", {}, "has 45 characters", "which has 45 characters", name="a" * 45),
    BadObject(
        "address without scheme",
        {"metrics": {"prometheus": {"address": "prometheus:9090"}}},
        "spec.metrics.prometheus.address",
        "spec.metrics.prometheus.address is prometheus:9090",
    ),
]

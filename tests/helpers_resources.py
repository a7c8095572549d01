"""Builds the children of the sample objects, and keeps the golden files of them.

python tests/helpers_resources.py    write the golden files anew (`make golden`)
"""

from pathlib import Path
from typing import Any

import yaml

from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Manifest
from phasesplit.api.validation import parse_spec
from phasesplit.resources.children import build_accepted_revision, build_children, build_scale
from phasesplit.resources.context import BuildContext, ImageSettings

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "manifests" / "samples"
GOLDEN = ROOT / "tests" / "unit" / "resources" / "golden"
SETTINGS = ImageSettings(worker_image="example.org/worker:1", control_image="example.org/control:1")
MINIMAL: dict[str, Any] = {"model": {"source": {"huggingFace": {"repository": "Qwen/Qwen3-4B"}}}}


def read_sample(name: str) -> Manifest:
    """A sample object as a plain dict."""
    loaded = yaml.safe_load((SAMPLES / f"{name}.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def sample_names() -> list[str]:
    """Names of all samples."""
    return sorted(path.stem for path in SAMPLES.glob("*.yaml") if path.stem != "kustomization")


def build_context(raw_spec: Manifest | None = None, name: str = "chat", **changes: Any) -> BuildContext:
    """A context as the operator makes it; `raw_spec` is laid over the smallest spec."""
    spec = parse_spec(name, MINIMAL | (raw_spec or {}))
    values: dict[str, Any] = {
        "name": name,
        "namespace": "ai",
        "uid": "0000-1111",
        "generation": 3,
        "spec": spec,
        "settings": SETTINGS,
    }
    return BuildContext(**(values | changes))


def worker_container(statefulset: Manifest) -> Manifest:
    """The worker container of a StatefulSet."""
    containers = statefulset["spec"]["template"]["spec"]["containers"]
    return next(container for container in containers if container["name"] == "worker")


def parse_minimal(**changes: Any) -> DisaggregatedModelSpec:
    """The smallest spec with top-level parts replaced."""
    return DisaggregatedModelSpec.model_validate(MINIMAL | changes)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def render_golden(sample: str) -> str:
    """All children of a sample as YAML; both pools gated where the sample is the full one."""
    document = read_sample(sample)
    gated = dict.fromkeys(Pool, sample == "full")
    context = build_context(
        document["spec"], document["metadata"]["name"], gated=gated, has_nvidia_runtime_class=True
    )
    table = RoutingTable(version=7, namespace="ai", name=context.name, model=context.model_name)
    children = [
        *build_children(context, table),
        build_scale(context, Pool.PREFILL, 2),
        build_accepted_revision(context),
    ]
    return yaml.dump_all(children, Dumper=_PlainDumper, sort_keys=False, width=110)


def write_golden() -> None:
    """Write every golden file."""
    for sample in sample_names():
        (GOLDEN / f"{sample}.yaml").write_text(render_golden(sample))


if __name__ == "__main__":
    write_golden()

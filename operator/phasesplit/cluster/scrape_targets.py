"""Which pods a Prometheus should scrape, in the form of its HTTP service discovery.

Served by the operator, which watches these pods anyway: so Prometheus needs no right to list pods, and
a build of it without Kubernetes discovery will do. Pure.
"""

from collections.abc import Iterable
from typing import Any

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest

ANNOTATION_SCRAPE = "prometheus.io/scrape"
ANNOTATION_PORT = "prometheus.io/port"
ANNOTATION_PATH = "prometheus.io/path"


def build_targets(pods: Iterable[Manifest]) -> list[dict[str, Any]]:
    """One group for each running pod that says it can be scraped, in the order of names."""
    groups = []
    for pod in sorted(pods, key=_full_name):
        metadata, status = pod["metadata"], pod.get("status") or {}
        annotations = metadata.get("annotations") or {}
        port = annotations.get(ANNOTATION_PORT, "")
        running = status.get("phase") == "Running" and status.get("podIP")
        if not running or annotations.get(ANNOTATION_SCRAPE) != "true" or not port.isdigit():
            continue
        groups.append(
            {
                "targets": [_address(status["podIP"], port)],
                "labels": {
                    "__metrics_path__": annotations.get(ANNOTATION_PATH, names.PATH_METRICS),
                    "pod": metadata["name"],
                    "node": (pod.get("spec") or {}).get("nodeName", ""),
                    "component": (metadata.get("labels") or {}).get(names.LABEL_COMPONENT, ""),
                },
            }
        )
    return groups


def _address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _full_name(pod: Manifest) -> tuple[str, str]:
    return pod["metadata"].get("namespace", ""), pod["metadata"]["name"]

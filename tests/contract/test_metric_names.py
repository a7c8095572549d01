"""Router and worker expose the metrics that the operator reads, under the agreed names and labels."""

import re
from pathlib import Path

from phasesplit.api import metric_names
from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import LatencyClass, RoutingTable
from phasesplit_router.metrics import Metrics
from phasesplit_worker.server.metrics import LoadReading, WorkerMetrics

AGREED = {
    value
    for name, value in vars(metric_names).items()
    if name.isupper() and not name.startswith("LABEL_") and name != "PREFIX"
}
ROOT = Path(__file__).resolve().parents[2]


def router_names() -> set[str]:
    metrics = Metrics(name="chat", namespace="ai")
    metrics.take_table(RoutingTable(classes=(LatencyClass(name="default", ttft_s=2, tpot_s=0.1),)))
    return {family.name for family in metrics.registry.collect()}


def worker_names() -> set[str]:
    metrics = WorkerMetrics(model="chat", namespace="ai", pool=Pool.PREFILL, role=lambda: Role.PREFILL)
    metrics.read_load_from(LoadReading)
    return {family.name for family in metrics._registry.collect()}


def without_suffix(name: str) -> str:
    """prometheus_client keeps counters without `_total`."""
    return name.removesuffix("_total")


def test_exposed_names_are_agreed_ones() -> None:
    agreed = {without_suffix(name) for name in AGREED}
    assert {without_suffix(name) for name in router_names() | worker_names()} <= agreed


def test_queries_name_agreed_metrics_only() -> None:
    """A literal metric name in the control plane would survive a renaming unnoticed."""
    # The operator's own metrics are nobody else's contract.
    pattern = re.compile(r"phasesplit_(?!operator_)[a-z_]+_(?:seconds|total|bytes|perc)\b")
    for folder in (
        "operator/phasesplit/cluster",
        "operator/phasesplit/operator",
        "operator/phasesplit/planner",
    ):
        for path in (ROOT / folder).glob("*.py"):
            found = {name.removesuffix("_bucket") for name in pattern.findall(path.read_text())}
            assert found <= AGREED, path

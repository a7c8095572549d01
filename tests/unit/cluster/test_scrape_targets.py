"""What the operator tells a Prometheus to scrape."""

from typing import Any

from phasesplit.cluster.scrape_targets import build_targets


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "ai",
            "labels": {"app.kubernetes.io/component": "worker"},
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "8000"},
        },
        "spec": {"nodeName": "a"},
        "status": {"phase": "Running", "podIP": "10.0.0.1"} | status,
    }


def test_running_pods_in_order_of_their_names() -> None:
    groups = build_targets([pod("b", podIP="10.0.0.2"), pod("a")])
    assert groups == [
        {
            "targets": [f"10.0.0.{number}:8000"],
            "labels": {"__metrics_path__": "/metrics", "pod": name, "node": "a", "component": "worker"},
        }
        for number, name in ((1, "a"), (2, "b"))
    ]


def test_address_of_version_6_is_bracketed() -> None:
    assert build_targets([pod("a", podIP="fd00::1")])[0]["targets"] == ["[fd00::1]:8000"]


def test_pods_that_cannot_be_scraped_are_left_out() -> None:
    silent, odd = pod("silent"), pod("odd")
    silent["metadata"]["annotations"] = {}
    odd["metadata"]["annotations"]["prometheus.io/port"] = "http"
    assert build_targets([pod("pending", phase="Pending"), pod("new", podIP=""), silent, odd]) == []

"""Cost of the operator: one tick's decisions, then ten objects at rest: memory, CPU, writes.

A tick is every decision of one pass over an object with 64 workers under load, without I/O; `--tick` measures
that alone, without a cluster.

`make bench-operator`. API server, controllers and scheduler are real; pods are on paper nodes, and their
routers and workers are scripted, so that what is measured is the operator alone. All objects are served
split over two nodes, the costliest state at rest: links are probed every few seconds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from helpers_cluster import PaperNode, connect
from helpers_operator_cluster import Stage, stage
from helpers_tick import BusyObject
from testbed.paths import repository_root

OBJECTS = 10
SETTLE_S = 30.0
MEASURE_S = 60.0
RSS_BAR_MIB = 128.0
CPU_BAR_CORES = 0.05
TICK_WORKERS = 64
TICKS = 30
TICK_BAR_MS = 50.0
NODES = [PaperNode("bench-a", cpu="64"), PaperNode("bench-b", cpu="64")]
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no memory")


def cpu_s(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def serve_objects(found: Stage, count: int) -> None:
    """That many objects, each served split."""
    pool = found.manifest("x")["spec"]["prefill"]
    for number in range(count):
        found.apply(
            f"bench-{number}",
            mode="Split",
            prefill={**pool, "nodeSelector": {"kubernetes.io/hostname": "bench-a"}},
            decode={**pool, "nodeSelector": {"kubernetes.io/hostname": "bench-b"}},
        )
    for number in range(count):
        found.wait_mode(f"bench-{number}", "Split", timeout_s=120)
        found.wait_condition(f"bench-{number}", "Ready", "True", timeout_s=120)


def measure_ticks() -> list[dict[str, Any]]:
    """CPU of one pass's decisions: by the closed form, with a replay, with pools sized by their requests."""
    busy = BusyObject(TICK_WORKERS)
    results = []
    for evidence in ("closed form", "replay", "split, sized by its requests"):
        if evidence == "replay":
            busy.replay()
        elif evidence != "closed form":
            busy = BusyObject(TICK_WORKERS, mode="Split", traced=True)
        times_ms = []
        for _ in range(TICKS):
            started_s = time.process_time()
            busy.tick()
            times_ms.append(1000 * (time.process_time() - started_s))
        label = f"one tick with {TICK_WORKERS} workers, {evidence}"
        results.append(result(f"{label}, median", statistics.median(times_ms), "ms", TICK_BAR_MS))
        results.append(result(f"{label}, slowest of {TICKS}", max(times_ms), "ms", TICK_BAR_MS))
    return results


def result(name: str, value: float, unit: str, bar: float) -> dict[str, Any]:
    """One entry of the last line; every bar is an upper bound."""
    holds = value <= bar
    return {"name": name, "value": round(value, 4), "unit": unit, "against": None, "bar": bar, "holds": holds}


def measure(found: Stage) -> list[dict[str, Any]]:
    """Memory, CPU and writes while nothing happens."""
    pid = found.operator.process.pid
    empty_mib = rss_mib(pid)
    serve_objects(found, OBJECTS)
    print(f"{OBJECTS} objects serve; waiting {SETTLE_S:g} s, then measuring {MEASURE_S:g} s", flush=True)
    time.sleep(SETTLE_S)
    words = len(found.operator.log())
    mark, probes = found.cluster.audit.mark(), found.kubelet.script.probes
    before_s, started_s = cpu_s(pid), time.monotonic()
    time.sleep(MEASURE_S)
    cores = (cpu_s(pid) - before_s) / (time.monotonic() - started_s)
    written = found.operator.writes(mark)
    for event in written:
        print(f"written at rest: {event}")
    if written:
        print(found.operator.log()[words:])
    print(f"{found.kubelet.script.probes - probes} links probed")
    full_mib = rss_mib(pid)
    return [
        result("memory of the operator without objects (RSS)", empty_mib, "MiB", RSS_BAR_MIB),
        result(f"memory of the operator with {OBJECTS} objects (RSS)", full_mib, "MiB", RSS_BAR_MIB),
        result(f"CPU at rest with {OBJECTS} objects", cores, "cores", CPU_BAR_CORES),
        result("mutating requests at rest, Lease apart", len(written), "requests", 0),
    ]


def measure_at_rest() -> list[dict[str, Any]]:
    """The running operator, on the testbed."""
    cluster = connect()
    namespace = f"bench-operator-{int(time.time())}"
    cluster.kubectl("create", "namespace", namespace)
    try:
        # As installed: default intervals, all but the images.
        with (
            tempfile.TemporaryDirectory() as folder,
            stage(cluster, namespace, Path(folder), NODES, TICK_SECONDS=2) as found,
        ):
            return measure(found)
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def main() -> None:
    """Measure; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tick", action="store_true", help="the decisions alone, without a cluster")
    options = parser.parse_args()
    results = measure_ticks()
    if not options.tick:
        results += measure_at_rest()
    for item in results:
        print(f"{item['name']}: {item['value']} {item['unit']} (bar {item['bar']}, holds: {item['holds']})")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=repository_root(),
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"bench": "operator", "commit": commit, "machine": machine, "results": results}))


if __name__ == "__main__":
    main()

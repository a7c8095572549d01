"""Pods on paper nodes that become ready without running, and routers and workers that say what a test wants.

Stands where the kubelet and the data plane stand: everything else (API server, controllers, scheduler,
operator) is real. Pods get addresses in 127.0.0.0/8, on which one scripted HTTP server listens.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kubernetes import client, config

from phasesplit.api import names
from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import (
    ClassReport,
    LinkSample,
    ModelFacts,
    ProbeResult,
    RouterReport,
    StepProfile,
    WorkerReport,
    WorkerState,
)
from phasesplit.api.routing import ServedMode
from testbed.kubectl import Kubectl

_POLL_S = 0.2
_FAST_BYTES_PER_S = 2e9
_LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
_PROFILE = StepProfile(base_s=0.005, per_prefill_token_s=0.002, per_decode_sequence_s=0.01, num_samples=100)


@dataclass
class Script:
    """What the scripted routers and workers of one namespace say. Tests change it while it is in use."""

    link_bytes_per_s: float = _FAST_BYTES_PER_S
    in_flight: int = 0
    idle_s: float = 1e6
    fingerprints: dict[str, str] = field(default_factory=dict)  # by pool
    failed: dict[str, str] = field(default_factory=dict)  # pod -> why its model failed to load
    probes: int = 0

    def worker(self, pod: dict[str, Any]) -> WorkerReport:
        name, pool = pod["metadata"]["name"], Pool(pod["metadata"]["labels"][names.LABEL_POOL])
        failed = self.failed.get(name)
        return WorkerReport(
            pod=name,
            node=pod["spec"].get("nodeName", ""),
            pool=pool,
            role=Role.COLOCATED,
            role_version=0,
            state=WorkerState.FAILED if failed else WorkerState.READY,
            message=failed or "",
            engine_id=pod["metadata"]["uid"],
            model=ModelFacts(
                name="m",
                fingerprint=self.fingerprints.get(pool, "same"),
                weights_bytes=500_000_000,
                kv_layout=_LAYOUT,
                max_model_length=4096,
            ),
            kv_total_blocks=1000,
            profile=_PROFILE,
        )


class PaperKubelet:
    """Makes pods on paper nodes ready, ends deleted ones, and answers for their programs."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        api = config.new_client_from_config(str(kubectl.kubeconfig), kubectl.context)
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._servers: dict[str, ThreadingHTTPServer] = {}
        self._addresses: dict[str, str] = {}  # pod uid -> address
        self._pods: list[dict[str, Any]] = []
        self.script = Script()
        # Says of a pod whether it becomes ready; by default one whose image can be pulled.
        self.starts: Callable[[dict[str, Any]], bool] = lambda pod: "broken" not in _image(pod)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=30)
        # Each takes half a second to notice; all at once they take no longer.
        closing = [threading.Thread(target=_close, args=(server,)) for server in self._servers.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(timeout=10)

    def _run(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                self._pass()
            except (client.ApiException, OSError):
                continue  # the API server is busy, or the pod changed meanwhile: look again

    def _pass(self) -> None:
        listed = self._core.list_namespaced_pod(self._namespace, _preload_content=False, _request_timeout=10)
        self._pods = json.loads(listed.data)["items"]
        for pod in self._pods:
            if not pod["spec"].get("nodeName"):
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self._core.delete_namespaced_pod(
                    pod["metadata"]["name"], self._namespace, grace_period_seconds=0, _request_timeout=10
                )
            elif self._wanted(pod) != _shown(pod):
                self._patch(pod)

    def _wanted(self, pod: dict[str, Any]) -> str:
        if not self.starts(pod):
            return "broken"
        return "failed" if pod["metadata"]["name"] in self.script.failed else "ready"

    def _patch(self, pod: dict[str, Any]) -> None:
        wanted = self._wanted(pod)
        container = pod["spec"]["containers"][0]
        state: dict[str, Any] = {"running": {}}
        if wanted == "broken":
            message = f"Back-off pulling image {container['image']}"
            state = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
        truth = "True" if wanted == "ready" else "False"
        status = {
            "phase": "Pending" if wanted == "broken" else "Running",
            "podIP": self._address(pod),
            "podIPs": [{"ip": self._address(pod)}],
            "conditions": [
                {"type": kind, "status": truth} for kind in ("Initialized", "ContainersReady", "Ready")
            ],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": wanted == "ready",
                    "started": wanted != "broken",
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        self._core.patch_namespaced_pod_status(
            pod["metadata"]["name"], self._namespace, {"status": status}, _request_timeout=10
        )

    def _address(self, pod: dict[str, Any]) -> str:
        uid = pod["metadata"]["uid"]
        if uid not in self._addresses:
            number = len(self._addresses) + 2
            address = f"127.9.{number // 250}.{number % 250 + 1}"
            self._addresses[uid] = address
            component = pod["metadata"]["labels"].get(names.LABEL_COMPONENT)
            port = names.ROUTER_API_PORT if component == "router" else names.WORKER_API_PORT
            server = ThreadingHTTPServer((address, port), self._handler(pod))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers[uid] = server
        return self._addresses[uid]

    def _handler(self, pod: dict[str, Any]) -> type[BaseHTTPRequestHandler]:
        kubelet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(kubelet.report(pod["metadata"]["labels"][names.LABEL_MODEL]).model_dump_json())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(kubelet.probe(pod, body).model_dump_json())

            def log_message(self, *_: object) -> None:
                """Tests' output stays readable."""

            def _answer(self, text: str) -> None:
                with suppress(ConnectionError):  # whoever asked has given up
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text.encode())

        return Handler

    def report(self, model: str) -> RouterReport:
        """What a router of this object says."""
        script = self.script
        workers = [
            script.worker(pod)
            for pod in self._pods
            if pod["metadata"]["labels"].get(names.LABEL_MODEL) == model
            and names.LABEL_POOL in pod["metadata"]["labels"]
            and pod["status"].get("podIP")
        ]
        return RouterReport(
            classes=[self._class_report()] if script.in_flight else [],
            namespace=self._namespace,
            name=model,
            mode=ServedMode.COLOCATED,
            in_flight=script.in_flight,
            idle_s=script.idle_s,
            workers=workers,
        )

    @staticmethod
    def _class_report() -> ClassReport:
        """A class within its targets, with numbers that never stand still."""
        noise = time.monotonic() % 1
        return ClassReport(
            name="default",
            arrival_rate_per_s=0.1 + noise / 100,
            attained=50,
            finished=50,
            ttft_p50_s=0.1 + noise,
            ttft_p95_s=0.2 + noise,
            tpot_p50_s=0.01 + noise / 100,
            tpot_p95_s=0.02 + noise / 100,
            mean_prompt_tokens=100 + noise,
            mean_output_tokens=10 + noise,
            queue_s=noise,
        )

    def probe(self, puller: dict[str, Any], body: dict[str, Any]) -> ProbeResult:
        """What a worker measures: the scripted speed."""
        self.script.probes += 1
        rate = self.script.link_bytes_per_s
        sample = LinkSample(
            from_node=body["node"],
            to_node=puller["spec"]["nodeName"],
            from_pod=body["pod"],
            to_pod=puller["metadata"]["name"],
            transport="TCP",
            bytes=body["bytes"],
            busy_s=body["bytes"] / rate,
            age_s=0,
            probe=True,
        )
        return ProbeResult(sample=sample)


@contextmanager
def paper_kubelet(kubectl: Kubectl, namespace: str) -> Iterator[PaperKubelet]:
    """A kubelet on paper for all pods of a namespace that are bound to nodes."""
    kubelet = PaperKubelet(kubectl, namespace)
    kubelet.start()
    try:
        yield kubelet
    finally:
        kubelet.stop()


def _close(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


def _image(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["image"])


def _shown(pod: dict[str, Any]) -> str:
    """What was last patched: `ready`, `failed`, `broken`, or nothing yet."""
    statuses = pod["status"].get("containerStatuses")
    if not statuses:
        return ""
    if "waiting" in statuses[0].get("state", {}):
        return "broken"
    return "ready" if statuses[0]["ready"] else "failed"

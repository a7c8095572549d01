"""What a cluster has beside Kubernetes itself: DNS for Services, and volumes that stay on a node.

CoreDNS runs on the host and is reached through the usual Service 10.96.0.10. Each node offers some local
volumes of the class `local-path`, bound to a claim when its pod is scheduled.
"""

import json
import shutil
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

from testbed.binaries import binary
from testbed.certificates import Pki
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from testbed.processes import URGENT, Daemons, in_netns, run
from testbed.spec import CLUSTER_DOMAIN, DNS_SERVICE_IP, HOST_IP, ClusterSpec, NodeSpec

STORAGE_CLASS = "local-path"
VOLUMES_PER_NODE = 10
_VOLUME_SIZE = "20Gi"
_DNS_PORT = 10053
_READY_PORT = 10054
_START_TIMEOUT_S = 60.0

# Asks for one name and prints its address; run inside a node's network.
_QUERY = """
import socket, struct, sys
name = b"".join(bytes([len(part)]) + part.encode() for part in sys.argv[2].split("."))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(1)
    s.sendto(struct.pack(">6H", 7, 256, 1, 0, 0, 0) + name + b"\\0\\0\\1\\0\\1", (sys.argv[1], 53))
    print(socket.inet_ntoa(s.recv(512)[-4:]))
"""


def start_dns(root: Path, daemons: Daemons, pki: Pki) -> None:
    corefile = root / "Corefile"
    corefile.write_text(_corefile(pki))
    daemons.spawn("coredns", *URGENT, binary("coredns"), "-conf", corefile)


def dns_objects() -> list[dict[str, Any]]:
    """The Service and its hand-written endpoint: CoreDNS is no pod."""
    ports = [
        {"name": name, "port": 53, "protocol": protocol}
        for name, protocol in (("dns", "UDP"), ("dns-tcp", "TCP"))
    ]
    metadata = {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": DNS_SERVICE_IP, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "ports": [{**port, "port": _DNS_PORT} for port in ports],
            "endpoints": [{"addresses": [HOST_IP], "conditions": {"ready": True}}],
        },
    ]


def wait_for_dns(spec: ClusterSpec, daemons: Daemons) -> None:
    """Wait until every node resolves a name through the Service: kube-proxy and CoreDNS both work."""
    daemons.wait_for(_coredns_is_ready, _START_TIMEOUT_S, "CoreDNS", needs=("coredns",))
    for node in spec.nodes:
        daemons.wait_for(
            partial(_resolves, node),
            _START_TIMEOUT_S,
            f"Services and DNS on {node.name}",
            needs=("coredns", f"{node.name}-kube-proxy"),
        )


def _coredns_is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{_READY_PORT}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, TimeoutError, ConnectionError):
        return False


def _resolves(node: NodeSpec) -> bool:
    query = (
        "/usr/bin/env",
        "python3",
        "-c",
        _QUERY,
        DNS_SERVICE_IP,
        f"kubernetes.default.svc.{CLUSTER_DOMAIN}",
    )
    done = run(*in_netns(node.netns, *query), check=False, timeout_s=10)
    return done.stdout.strip() == "10.96.0.1"


def _corefile(pki: Pki) -> str:
    resolver = Path("/etc/resolv.conf")
    has_resolver = resolver.exists() and any(
        line.startswith("nameserver") for line in resolver.read_text().splitlines()
    )
    forward = "    forward . /etc/resolv.conf\n" if has_resolver else ""
    return f""".:{_DNS_PORT} {{
    bind {HOST_IP}
    errors
    ready 127.0.0.1:{_READY_PORT}
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {pki.kubeconfig("dns")}
        pods insecure
        ttl 2
    }}
{forward}}}
"""


def storage_objects(root: Path, spec: ClusterSpec) -> list[dict[str, Any]]:
    """The class and the volumes of every node, with their folders made."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    return [
        storage_class,
        *(_volume(root, node, number) for node in spec.nodes for number in range(VOLUMES_PER_NODE)),
    ]


def _volume(root: Path, node: NodeSpec, number: int) -> dict[str, Any]:
    folder = root / node.name / "volumes" / str(number)
    _make_folder(folder)
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{node.name}-{number}"},
        "spec": {
            "capacity": {"storage": _VOLUME_SIZE},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
        },
    }


def renew_volumes(root: Path, kubectl: Kubectl) -> None:
    """Empty the volumes whose claims are gone and offer them again, as a provisioner would."""
    for volume in kubectl.get("persistentvolumes")["items"]:
        if (
            volume["status"].get("phase") != "Released"
            or volume["spec"].get("storageClassName") != STORAGE_CLASS
        ):
            continue
        folder = Path(volume["spec"]["local"]["path"])
        if folder.is_relative_to(root):
            shutil.rmtree(folder)
            _make_folder(folder)
        patch = json.dumps([{"op": "remove", "path": "/spec/claimRef"}])
        kubectl("patch", "persistentvolume", volume["metadata"]["name"], "--type=json", f"--patch={patch}")


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)  # a pod writes as whatever user it runs as


def apply_addons(root: Path, spec: ClusterSpec, kubectl: Kubectl) -> None:
    kubectl.apply(*dns_objects(), *storage_objects(root, spec))


def wait_for_default_account(daemons: Daemons, kubectl: Kubectl) -> None:
    """Pods are refused until the controller manager has made this."""

    def exists() -> bool:
        try:
            return kubectl.find("serviceaccount", "default", "-n", "default") is not None
        except TestbedError:
            return False  # the API server is still settling; the bound is the caller's

    daemons.wait_for(exists, _START_TIMEOUT_S, "the default ServiceAccount", needs=("controller-manager",))

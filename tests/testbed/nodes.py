"""One node: containerd, kubelet and kube-proxy in a network namespace, with folders and a cgroup of its own.

Knows the configuration of the three; the address plan comes from the spec, the files of containers from
`images`. A node can be stopped and started again, as a machine that loses power.
"""

import json
import os
from pathlib import Path
from textwrap import dedent
from typing import Any

from testbed import network
from testbed.binaries import CNI_PLUGINS, RUNC, binary
from testbed.certificates import Pki
from testbed.cgroups import cgroup_pids, cgroup_prefix, create_cgroup
from testbed.errors import TestbedError
from testbed.images import PAUSE_IMAGE, host_mounts
from testbed.processes import URGENCY, URGENT, Daemons, in_netns, pids_naming, run, stop
from testbed.spec import CLUSTER_DOMAIN, DNS_SERVICE_IP, GPU_RESOURCE, POD_SUPERNET, NodeSpec

_START_TIMEOUT_S = 60.0
_IMPORT_TIMEOUT_S = 300.0


class NodeFiles:
    """Where a node keeps its things under the state root."""

    def __init__(self, root: Path, node: NodeSpec) -> None:
        self.folder = root / node.name
        self.containerd_socket = self.folder / "containerd.sock"
        self.kubelet = self.folder / "kubelet"
        self.cgroup = f"{cgroup_prefix(root)}{node.name}"
        self.gpus = self.folder / "gpus"

    def config(self, name: str, content: object) -> Path:
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        return path


def start_containerd(root: Path, node: NodeSpec, daemons: Daemons) -> None:
    """Start the container runtime; `import_archive` works when this has returned."""
    files = NodeFiles(root, node)
    (files.folder / "cni").mkdir(parents=True, exist_ok=True)
    files.config("cni/10-pods.conflist", _cni(files, node))
    spec = json.loads(run(binary("ctr"), "oci", "spec").stdout)
    spec["mounts"] += host_mounts()
    files.config("base-spec.json", spec)
    # Shims are as urgent as containerd; what runs in containers is not.
    runc = files.config("runc.sh", f'#!/bin/sh\nexec nice -n {URGENCY} {RUNC} "$@"\n')
    runc.chmod(0o755)
    config = files.config("containerd.toml", _containerd(files, runc))
    name = f"{node.name}-containerd"
    # containerd looks for its shim on PATH.
    daemons.spawn(
        name,
        *URGENT,
        *in_netns(node.netns, binary("containerd"), "-c", config),
        env={"PATH": f"{binary('containerd').parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"},
    )

    def answers() -> bool:
        done = run(binary("ctr"), "-a", files.containerd_socket, "version", check=False, timeout_s=10)
        return done.returncode == 0

    daemons.wait_for(answers, _START_TIMEOUT_S, name, needs=(name,))


def import_archive(root: Path, node: NodeSpec, archive: Path) -> str:
    """Load an OCI or Docker archive into a node's images."""
    socket = NodeFiles(root, node).containerd_socket
    ctr = (binary("ctr"), "-a", socket, "-n", "k8s.io", "images", "import", archive)
    return run(*ctr, timeout_s=_IMPORT_TIMEOUT_S).stdout


def start_kubelet(root: Path, node: NodeSpec, daemons: Daemons, pki: Pki) -> None:
    files = NodeFiles(root, node)
    create_cgroup(files.cgroup)
    config = files.config("kubelet.json", _kubelet(files, node, pki))
    daemons.spawn(
        f"{node.name}-kubelet",
        *URGENT,
        *in_netns(node.netns, binary("kubelet")),
        f"--config={config}",
        f"--kubeconfig={pki.kubeconfig(node.name)}",
        f"--root-dir={files.kubelet}",
        f"--cert-dir={files.folder}/pki",
        f"--hostname-override={node.name}",
        f"--node-ip={node.ip}",
        f"--node-labels=topology.kubernetes.io/zone=zone{node.index // 2}",
    )


def start_proxy(root: Path, node: NodeSpec, daemons: Daemons, pki: Pki) -> None:
    config = NodeFiles(root, node).config("kube-proxy.json", _proxy(node, pki))
    daemons.spawn(
        f"{node.name}-kube-proxy", *URGENT, *in_netns(node.netns, binary("kube-proxy"), f"--config={config}")
    )


def power_off(root: Path, node: NodeSpec, daemons: Daemons) -> None:
    """End the node as a machine that loses power: first it cannot be reached, then nothing on it runs."""
    network.connect(node, False)
    own = [record for record in daemons.records() if record.name.startswith(f"{node.name}-")]
    left = stop([record.pid for record in own if record.is_alive()])
    left += stop(shim_pids(root, node) | cgroup_pids(NodeFiles(root, node).cgroup))
    if left:
        raise TestbedError(f"{node.name} does not go off: processes {left} do not end")
    for record in own:
        daemons.forget(record.name)


def power_on(root: Path, node: NodeSpec, daemons: Daemons, pki: Pki) -> None:
    """Start a node that was powered off; its disk is as it was."""
    network.connect(node, True)
    start_containerd(root, node, daemons)
    start_kubelet(root, node, daemons, pki)
    start_proxy(root, node, daemons, pki)
    gpus = NodeFiles(root, node).gpus
    if gpus.exists():
        set_gpus(root, node, daemons, int(gpus.read_text()))


def shim_pids(root: Path, node: NodeSpec) -> set[int]:
    """Containerd's shims, which outlive it by design."""
    return pids_naming(str(NodeFiles(root, node).containerd_socket), {"containerd-shim-runc-v2"})


def set_gpus(root: Path, node: NodeSpec, daemons: Daemons, count: int) -> None:
    """Offer `count` pretended GPUs; the plugin starts with the first and follows the number from then on."""
    files = NodeFiles(root, node)
    files.gpus.write_text(str(count))
    name = f"{node.name}-fakegpu"
    record = daemons.record(name)
    if count and (record is None or not record.is_alive()):
        socket = files.kubelet / "plugins_registry" / "fakegpu.sock"
        words = (f"-socket={socket}", f"-resource={GPU_RESOURCE}", f"-count-file={files.gpus}")
        daemons.spawn(name, binary("fakegpu"), *words)


def _cni(files: NodeFiles, node: NodeSpec) -> dict[str, Any]:
    ipam = {
        "type": "host-local",
        "dataDir": str(files.folder / "ipam"),
        "ranges": [[{"subnet": node.pod_cidr}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": ipam,
    }
    return {"cniVersion": "1.0.0", "name": node.netns, "plugins": [bridge]}


def _containerd(files: NodeFiles, runc: Path) -> str:
    # Without restrict_oom_score_adj runc dies in a container of its own, saying nothing of the reason.
    # The namespaces of pods are mounted under the state folder so that `down` finds all of them.
    folder = files.folder
    return dedent(f"""\
        version = 3
        root = "{folder}/containerd"
        state = "{folder}/state"
        [grpc]
        address = "{files.containerd_socket}"
        [ttrpc]
        address = "{folder}/ttrpc.sock"
        [plugins."io.containerd.internal.v1.opt"]
        path = "{folder}/opt"
        [plugins."io.containerd.cri.v1.images".pinned_images]
        sandbox = "{PAUSE_IMAGE}"
        [plugins."io.containerd.cri.v1.runtime"]
        restrict_oom_score_adj = true
        netns_mounts_under_state_dir = true
        [plugins."io.containerd.cri.v1.runtime".cni]
        bin_dirs = ["{CNI_PLUGINS}"]
        conf_dir = "{folder}/cni"
        [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
        base_runtime_spec = "{folder}/base-spec.json"
        [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        Root = "{folder}/runc"
        SystemdCgroup = false
        [plugins."io.containerd.nri.v1.nri"]
        disable = true
        """)


def _kubelet(files: NodeFiles, node: NodeSpec, pki: Pki) -> dict[str, Any]:
    folder = files.folder
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "authentication": {
            "anonymous": {"enabled": False},
            "x509": {"clientCAFile": str(pki.path("ca.crt"))},
            "webhook": {"enabled": True},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki.path(f"{node.name}.crt")),
        "tlsPrivateKeyFile": str(pki.path(f"{node.name}.key")),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{files.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": ["none"],
        "containerRuntimeEndpoint": f"unix://{files.containerd_socket}",
        "clusterDNS": [DNS_SERVICE_IP],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": "/etc/resolv.conf",
        # The host's disk and memory are shared by all nodes: no node may evict for what others use.
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 10,
        "syncFrequency": "10s",
        # A killed container comes back at once and not after minutes.
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
    }


def _proxy(node: NodeSpec, pki: Pki) -> dict[str, Any]:
    return {
        "kind": "KubeProxyConfiguration",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(pki.kubeconfig("proxy"))},
        "clusterCIDR": POD_SUPERNET,
        "hostnameOverride": node.name,
        # The host's connection tracking limits are not the testbed's to change.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }

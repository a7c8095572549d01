"""A testbed from nothing to ready, and what it says about itself. Composition of the other modules.

`up` may be called again and again: a healthy testbed of the same shape is returned at once, a broken one is
cleared away first, a healthy one of another shape is refused.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed import addons, control_plane, network, nodes, teardown
from testbed.binaries import binary, ensure_binaries, ensure_packages
from testbed.certificates import Pki
from testbed.errors import TestbedError
from testbed.images import compile_code, write_archive
from testbed.instance import NODES_TIMEOUT_S, Testbed, current, running, write_down
from testbed.locks import exclusive
from testbed.paths import cache_dir, repository_root, state_root, user_kubeconfig
from testbed.spec import GPU_RESOURCE, ClusterSpec, plan_cluster

__all__ = ["Testbed", "current", "down", "ensure_up", "programs_folder", "running", "status"]

_LOCK_TIMEOUT_S = 900.0
# A Unix socket's path has at most 107 characters; the kubelet's longest below the root has about 50.
_MAX_ROOT_LENGTH = 50


def ensure_up(spec: ClusterSpec | None = None) -> Testbed:
    """A healthy testbed: the running one when it has the shape asked for, or none was; else a new one."""
    _require_root()
    say = _clock()
    with _only_one():
        testbed = current()
        if testbed is not None and testbed.checkout != repository_root():
            say(f"replacing the testbed of {testbed.checkout}: its pods would run the code there")
        elif testbed is not None and _healthy(testbed):
            if spec is not None and spec != testbed.spec:
                raise TestbedError(
                    "a testbed of another shape is running: `down` ends it, then `up` makes this one"
                )
            addons.renew_volumes(testbed.root, testbed.kubectl)
            _publish(testbed)
            return testbed
        return _replace(testbed, spec, say)


def _replace(testbed: Testbed | None, spec: ClusterSpec | None, say: Callable[[str], None]) -> Testbed:
    """A new testbed, of the shape asked for, else of the one before, else of two nodes."""
    root = state_root()
    _refuse_foreign(root)
    if teardown.leftovers(root):
        say("clearing away what a testbed before left behind")
        teardown.tear_down(root)
    teardown.refuse_other_kubelet()
    ensure_packages()
    ensure_binaries()
    shape = spec or (testbed.spec if testbed else plan_cluster(2))
    return _start(Testbed(root, shape, repository_root()), say)


def down() -> None:
    """End the testbed at the state root and remove all its traces; nothing happens when there is none."""
    _require_root()
    with _only_one():
        _refuse_foreign(state_root())
        teardown.tear_down(state_root())
        user_kubeconfig().unlink(missing_ok=True)


def status() -> dict[str, Any]:
    """What `status` prints: never an error for a testbed that is not there or is broken."""
    testbed = current()
    if testbed is None:
        return {"running": False, "healthy": False, "root": str(state_root())}
    serving = testbed.kubectl.is_serving()
    shown = (
        {item["metadata"]["name"]: item for item in testbed.kubectl.get("nodes")["items"]} if serving else {}
    )
    ready = testbed.ready_nodes() if serving else set()
    return {
        "running": True,
        "healthy": _healthy(testbed),
        "root": str(testbed.root),
        "checkout": str(testbed.checkout),
        "kubeconfig": str(testbed.kubeconfig),
        "auditLog": str(control_plane.audit_log(testbed.root)),
        "nodes": [
            {
                "name": node.name,
                "ip": node.ip,
                "podCIDR": node.pod_cidr,
                "ready": node.name in ready,
                "gpus": int(
                    shown.get(node.name, {}).get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0)
                ),
                "shape": network.shaped_rate(node),
            }
            for node in testbed.spec.nodes
        ],
        "processes": [
            {"name": record.name, "pid": record.pid, "alive": record.is_alive()}
            for record in testbed.daemons.records()
        ],
    }


def _start(testbed: Testbed, say: Callable[[str], None]) -> Testbed:
    root, spec, daemons, pki, kubectl = (
        testbed.root,
        testbed.spec,
        testbed.daemons,
        Pki(testbed.root),
        testbed.kubectl,
    )
    if len(str(root)) > _MAX_ROOT_LENGTH:
        raise TestbedError(
            f"the state root {root} is longer than {_MAX_ROOT_LENGTH} characters: sockets would not fit"
        )
    root.mkdir(parents=True)
    # Pods of another user read their volumes and logs below it.
    root.chmod(0o755)
    write_down(testbed)
    (root / "ip-forward-before").write_text(network.forwarding())
    pki.create(spec)
    network.create_network(spec)
    network.set_owner(root)
    images = root / "images.tar"
    compile_code()
    write_archive(images)
    say("certificates, network and images are made")
    control_plane.start_control_plane(root, daemons, pki, kubectl)
    say("the API server answers")
    for node in spec.nodes:
        nodes.start_containerd(root, node, daemons)
        nodes.import_archive(root, node, images)
        nodes.start_kubelet(root, node, daemons, pki)
        nodes.start_proxy(root, node, daemons, pki)
    addons.start_dns(root, daemons, pki)
    addons.apply_addons(root, spec, kubectl)
    addons.wait_for_default_account(daemons, kubectl)
    names = {node.name for node in spec.nodes}
    kubelets = [f"{name}-kubelet" for name in sorted(names)]
    daemons.wait_for(lambda: testbed.ready_nodes() >= names, NODES_TIMEOUT_S, "the nodes", needs=kubelets)
    say("the nodes are Ready")
    for node in spec.nodes:
        if node.gpus:
            testbed.set_gpus(node.name, node.gpus)
        if node.labels:
            kubectl("label", "node", node.name, "--overwrite", *(f"{k}={v}" for k, v in node.labels.items()))
    addons.wait_for_dns(spec, daemons)
    say("Services and DNS work")
    _publish(testbed)
    return testbed


def _healthy(testbed: Testbed) -> bool:
    try:
        return testbed.is_healthy()
    except TestbedError:
        return False  # a call to the cluster failed or did not end in time


def _publish(testbed: Testbed) -> None:
    """Put the kubeconfig and the programs a person wants at places that stay the same."""
    target = user_kubeconfig()
    target.parent.mkdir(parents=True, exist_ok=True)
    content = Pki(testbed.root).kubeconfig("admin").read_text()
    if not target.exists() or target.read_text() != content:
        target.touch(mode=0o600)
        target.write_text(content)
    folder = programs_folder()
    folder.mkdir(exist_ok=True)
    for name in ("kubectl", "helm"):
        link, program = folder / name, binary(name)
        if not link.is_symlink() or link.readlink() != program:
            link.unlink(missing_ok=True)
            link.symlink_to(program)


def programs_folder() -> Path:
    """Links to kubectl and helm, for a PATH."""
    return cache_dir() / "testbed" / "path"


def _only_one() -> Any:
    return exclusive(cache_dir() / "testbed" / "testbed.lock", _LOCK_TIMEOUT_S, "the testbed")


def _require_root() -> None:
    if os.geteuid() != 0:
        raise TestbedError("the testbed makes network namespaces and cgroups: run it as root")
    if shutil.which("nsenter") is None and shutil.which("apt-get") is None:
        raise TestbedError("the testbed needs `nsenter` from util-linux")


def _refuse_foreign(root: Path) -> None:
    """One testbed per host: the bridge says whose it is."""
    if shutil.which("ip") is None:
        return  # iproute2 is still to be installed, so there is no bridge either
    owner = network.owner()
    if owner is None or owner == root:
        return
    other = current(owner)
    if other is not None and _healthy(other):
        raise TestbedError(
            f"another testbed runs on this host, at {owner}: end it with PHASESPLIT_TESTBED_ROOT={owner}"
        )
    teardown.tear_down(owner)


def _clock() -> Callable[[str], None]:
    start_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    return say

"""Ends a testbed, whatever state it is in: healthy, half started, or left behind by a crash.

Finds what to end by the records of the daemons, by their command lines that name the state root, and by the
cgroups of the pods; then removes mounts, network, cgroups and files, and says what would not go.
"""

import json
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from testbed import cgroups, network
from testbed.binaries import MODULES
from testbed.errors import TestbedError
from testbed.processes import Daemons, pids_naming, run, stop, with_descendants

_CNI_RESULTS = Path("/var/lib/cni/results")
# One folder for all kubelets of a host, whatever their root; see refuse_other_kubelet.
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
# One folder for each sandbox and container, named by its identity.
_BUNDLES = "node*/state/io.containerd.runtime.v2.task/k8s.io"
_CONTAINER_LOG_LINKS = Path("/var/log/containers")
_PROGRAMS = {program for module in MODULES for program in module.programs.values()}


def tear_down(root: Path) -> None:
    """Leave nothing: no process, mount, namespace, cable, cgroup or file. TestbedError names what stayed."""
    prefix = cgroups.cgroup_prefix(root)
    forwarding = root / "ip-forward-before"
    sockets = _shim_sockets(root)
    # Kubelets and runtimes first, or they would bring back what is being ended.
    left = stop(with_descendants(_daemon_pids(root)))
    left += stop(cgroups.cgroup_pids(prefix))
    left += stop(_daemon_pids(root))
    _remove_traces(root)
    _unmount_below(root)
    for path in sockets:
        path.unlink(missing_ok=True)
    cgroups.delete_cgroups(prefix)
    network.delete_network()
    if forwarding.exists():
        network.restore_forwarding(forwarding.read_text())
    problems = [f"process {pid}" for pid in left]
    problems += [f"cgroup {path}" for path in cgroups.left_cgroups(prefix)]
    problems += [f"mount {point}" for point in _mounts_below(root)]
    if problems:
        raise TestbedError(f"the testbed did not go away completely: {', '.join(problems[:5])}")
    # Last and only when nothing is mounted below: a bind mount's files are the user's.
    if root.exists():
        shutil.rmtree(root)


def leftovers(root: Path) -> list[str]:
    """What exists of a testbed at `root`, in words; empty after a good `down`."""
    prefix = cgroups.cgroup_prefix(root)
    found = [f"process {pid}" for pid in sorted(_daemon_pids(root) | cgroups.cgroup_pids(prefix))]
    found += [f"mount {point}" for point in _mounts_below(root)]
    found += [f"cgroup {path}" for path in cgroups.left_cgroups(prefix)]
    found += [f"network {name}" for name in network.left_names()]
    if root.exists():
        found.append(f"folder {root}")
    return found


def _daemon_pids(root: Path) -> set[int]:
    """Recorded daemons, and our programs that name the root: shims outlive their containerd by design."""
    recorded = {record.pid for record in Daemons(root).records() if record.is_alive()}
    return recorded | pids_naming(f"{root}/", _PROGRAMS)


def _mounts_below(root: Path) -> list[str]:
    """Mount points under the root, deepest last as the kernel lists them."""
    points = (
        line.split()[1].replace("\\040", " ") for line in Path("/proc/self/mounts").read_text().splitlines()
    )
    return [point for point in points if point.startswith(f"{root}/")]


def _unmount_below(root: Path) -> None:
    for point in reversed(_mounts_below(root)):
        run("umount", "-l", point, check=False)


def _shim_sockets(root: Path) -> list[Path]:
    """The sockets that shims keep under /run; each shim wrote its own down in its bundle."""
    sockets = []
    for path in root.glob(f"{_BUNDLES}/*/bootstrap.json"):
        with suppress(OSError, ValueError):
            address = str(json.loads(path.read_text())["address"])
            sockets.append(Path(address.removeprefix("unix://")))
    return sockets


def _remove_traces(root: Path) -> None:
    """Files that CNI and the kubelet write at places which cannot be configured."""
    sandboxes = {path.name for path in root.glob(f"{_BUNDLES}/*")}
    results = [path for path in _CNI_RESULTS.glob("*") if sandboxes.intersection(path.name.split("-"))]
    plugins = [
        _DEVICE_PLUGINS / name for name in ("kubelet.sock", "kubelet_internal_checkpoint", "DEPRECATION")
    ]
    for path in [*results, *(plugins if not _answers(_DEVICE_PLUGINS / "kubelet.sock") else [])]:
        path.unlink(missing_ok=True)
    if _CONTAINER_LOG_LINKS.is_dir():
        for link in _CONTAINER_LOG_LINKS.iterdir():
            if link.is_symlink() and link.readlink().is_relative_to(root):
                link.unlink(missing_ok=True)


def refuse_other_kubelet() -> None:
    """A second Kubernetes on the host and ours would take each other's device plugins away."""
    if _answers(_DEVICE_PLUGINS / "kubelet.sock"):
        raise TestbedError("this host is a Kubernetes node already: the testbed needs one without a kubelet")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2)
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True

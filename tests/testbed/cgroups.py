"""The cgroup that holds a node's pods, on cgroup v1 and v2 hosts. Made empty, found again, removed."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_UNIFIED = _MOUNT / "cgroup.controllers"


def cgroup_prefix(root: Path) -> str:
    """How the cgroups of one testbed begin: cgroups are one for the host, whatever network it is in."""
    return f"phasesplit-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}-"


def create_cgroup(name: str) -> None:
    """Make the cgroup in every controller; the kubelet wants its root to be there."""
    if _UNIFIED.exists():
        controllers = " ".join(f"+{word}" for word in _UNIFIED.read_text().split())
        (_MOUNT / "cgroup.subtree_control").write_text(controllers)
        (_MOUNT / name).mkdir(exist_ok=True)
        return
    for controller in _controllers():
        (controller / name).mkdir(exist_ok=True)
    cpuset = _MOUNT / "cpuset"
    for setting in ("cpuset.cpus", "cpuset.mems"):
        if (cpuset / setting).exists():
            # A new cpuset is empty, and no process may enter an empty one.
            (cpuset / name / setting).write_text((cpuset / setting).read_text())


def cgroup_pids(prefix: str) -> set[int]:
    """Processes in every cgroup whose name starts with `prefix`, at any depth."""
    pids: set[int] = set()
    for top in _tops(prefix):
        for folder, _, _ in os.walk(top):
            try:
                pids.update(int(word) for word in (Path(folder) / "cgroup.procs").read_text().split())
            except OSError:
                continue  # the cgroup went away, or is threaded and lists its processes elsewhere
    return pids


def delete_cgroups(prefix: str) -> None:
    """Remove the emptied cgroups from the leaves up; one that still holds a process stays."""
    for top in _tops(prefix):
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:
                continue


def left_cgroups(prefix: str) -> list[Path]:
    return list(_tops(prefix))


def _tops(prefix: str) -> Iterator[Path]:
    for controller in [_MOUNT] if _UNIFIED.exists() else _controllers():
        yield from controller.glob(f"{prefix}*")


def _controllers() -> list[Path]:
    """The hierarchies of cgroup v1, the unified one beside them included; links to one are left out."""
    return [
        path
        for path in _MOUNT.iterdir()
        if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists()
    ]

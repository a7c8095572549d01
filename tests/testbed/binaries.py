"""The programs a testbed runs, built from the Go modules in `modules/` and cached outside the repository.

One cache folder per module, named by a hash of the module's files: a change to one rebuilds that one. Also
installs the few Debian packages the testbed needs, when it may.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from testbed.errors import TestbedError
from testbed.locks import exclusive
from testbed.paths import cache_dir
from testbed.processes import run, wait_for

CNI_PLUGINS = Path("/usr/lib/cni")
RUNC = Path("/usr/sbin/runc")
_MODULES = Path(__file__).parent / "modules"
_BUILD_TIMEOUT_S = 3600.0
_LOCK_TIMEOUT_S = 2 * 3600.0
_REPORT_EVERY_S = 15.0
_APT_TIMEOUT_S = 600.0

# Debian package -> a program or file that shows it is there.
_PACKAGES = {
    "runc": f"{RUNC}",
    "containernetworking-plugins": f"{CNI_PLUGINS}/bridge",
    "iptables": "/usr/sbin/iptables",
    "iproute2": "/usr/sbin/tc",
    "prometheus": "/usr/bin/prometheus",
    "openssl": "/usr/bin/openssl",
    "util-linux": "/usr/bin/nsenter",
}


@dataclass(frozen=True)
class Module:
    """A Go module and the programs it builds, by the name `go build` gives them and the name we use."""

    name: str
    programs: dict[str, str]
    usual: str
    variables: tuple[str, ...] = ()  # set at link time, as `package.name=value`

    @property
    def folder(self) -> Path:
        digest = _digest(_MODULES / self.name, self.variables)
        return cache_dir() / "testbed" / "bin" / f"{self.name}-{digest}"

    @property
    def link_flags(self) -> list[str]:
        return (
            ["-ldflags", " ".join(f"-X {variable}" for variable in self.variables)] if self.variables else []
        )

    def is_built(self) -> bool:
        return self.folder.is_dir()


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


MODULES = (
    Module("etcd", {"server": "etcd"}, "35 s"),
    Module(
        "kubernetes",
        _same(
            "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"
        ),
        "8 min",
        # Without it the API server calls itself v0.0.0-master, which clients and charts refuse.
        ("k8s.io/component-base/version.gitVersion=v1.36.3",),
    ),
    Module("containerd", _same("containerd", "containerd-shim-runc-v2", "ctr"), "2 min"),
    Module("coredns", _same("coredns"), "2 min"),
    Module("helm", _same("helm"), "90 s"),
    Module("nodeparts", _same("fakegpu", "pause"), "15 s"),
)


def binary(name: str) -> Path:
    """Where a program is; it is there once `ensure_binaries` has returned."""
    for module in MODULES:
        if name in module.programs.values():
            return module.folder / name
    raise KeyError(name)


def ensure_binaries() -> None:
    """Build what is not in the cache, one process at a time, and show progress. Seconds when all is there."""
    if all(module.is_built() for module in MODULES):
        return
    with exclusive(
        cache_dir() / "testbed" / "build.lock", _LOCK_TIMEOUT_S, "the build of the testbed's programs"
    ):
        missing = [module for module in MODULES if not module.is_built()]
        if missing and shutil.which("go") is None:
            raise TestbedError(
                "the program `go` is not on PATH: install Go 1.26 or newer to build the testbed"
            )
        for number, module in enumerate(missing, start=1):
            _build(module, f"[{number}/{len(missing)}] {module.name}")


def ensure_packages() -> None:
    """Install the Debian packages that are missing, or say in one sentence which to install."""
    missing = [package for package, path in _PACKAGES.items() if not Path(path).exists()]
    if not missing:
        return
    wanted = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise TestbedError(f"the testbed needs these packages, install them first: {wanted}")
    _say(f"installing {wanted} with apt-get")
    # RUNLEVEL keeps Debian from starting the installed services, Prometheus among them.
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    run("apt-get", "update", "-qq", timeout_s=_APT_TIMEOUT_S, env=quiet)
    run(
        "apt-get",
        "install",
        "-y",
        "-qq",
        "--no-install-recommends",
        *missing,
        timeout_s=_APT_TIMEOUT_S,
        env=quiet,
    )


def _digest(folder: Path, variables: tuple[str, ...]) -> str:
    digest = hashlib.sha256("".join(variables).encode())
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _build(module: Module, title: str) -> None:
    """Build into a scratch folder and rename it, so that a folder in the cache is always whole."""
    target = module.folder
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{module.name}-", dir=target.parent) as scratch:
        out = Path(scratch) / "bin"
        out.mkdir(mode=0o755)
        _go_build(module, out, title)
        for built, name in module.programs.items():
            if not (out / built).exists():
                raise TestbedError(f"{title}: `go build` made no program {built}")
            (out / built).rename(out / name)
        out.rename(target)


def _go_build(module: Module, out: Path, title: str) -> None:
    start_s = time.monotonic()
    _say(f"{title}: compiling, about {module.usual} on two cores")
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [
                "nice",
                "-n",
                "5",
                "go",
                "build",
                "-buildvcs=false",
                *module.link_flags,
                "-o",
                f"{out}/",
                "tool",
            ],
            cwd=_MODULES / module.name,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        last_s = start_s

        def ended() -> bool:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s - last_s >= _REPORT_EVERY_S:
                last_s = now_s
                _say(f"{title}: {now_s - start_s:.0f} s")
            return process.poll() is not None

        try:
            wait_for(ended, _BUILD_TIMEOUT_S, f"{title} to compile", interval_s=0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
        if process.returncode != 0:
            log.seek(0)
            raise TestbedError(f"{title}: `go build` failed:\n{log.read()[-2000:]}")
    _say(f"{title}: done in {time.monotonic() - start_s:.0f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

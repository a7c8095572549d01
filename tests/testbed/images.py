"""Container images without a registry and without gigabytes: empty folders, filled by bind mounts.

Every container of the testbed gets the host's `/usr` and friends, the Python installation, the virtual
environment, this checkout's code and the model cache, all read-only. So one image of a few kilobytes stands
for every image of the product. The product's real Dockerfiles are something else and are not used here.
"""

import compileall
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from testbed.binaries import binary
from testbed.paths import models_dir, repository_root

PAUSE_IMAGE = "phasesplit.dev/pause:dev"
PRODUCT_IMAGES = tuple(f"phasesplit.dev/{name}:dev" for name in ("control", "worker", "prometheus"))
MODELS_MOUNT = "/models"
# A place of their own: what lies under the checkout's path could be hidden by a pod's own volume at /tmp.
_HOME = "/opt/phasesplit"
_VENV = f"{_HOME}/venv"
_CODE = ("operator", "worker")
_HOST_MOUNTS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ssl",
    "/etc/ld.so.cache",
    "/etc/alternatives",
)
_PASSWD = """\
root:x:0:0:root:/root:/bin/sh
nonroot:x:65532:65532:nonroot:/tmp:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
"""
_ENVIRONMENT = {
    "PATH": f"{_HOME}/bin:{_VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": ":".join(f"{_HOME}/{name}" for name in _CODE),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    # A pod stands for one device: it computes on one core, or two pods would slow each other down.
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Entry:
    """A folder (no data) or a file in an image layer."""

    path: str
    data: bytes | None = None
    mode: int = 0o755


@dataclass(frozen=True)
class Image:
    """An image of one layer, with the container configuration of the OCI image spec."""

    name: str
    layer: bytes
    config: Mapping[str, object]


def host_mounts() -> list[dict[str, object]]:
    """The read-only bind mounts that fill every container, in the form of the OCI runtime spec."""
    sources = {Path(path): Path(path) for path in _HOST_MOUNTS}
    sources |= {folder: folder for folder in _python_folders()}
    sources[Path(_VENV)] = Path(sys.prefix)
    for name in _CODE:
        sources[Path(_HOME) / name] = repository_root() / name
    models_dir().mkdir(parents=True, exist_ok=True)
    sources[Path(MODELS_MOUNT)] = models_dir()
    return [
        {
            "destination": str(inside),
            "type": "bind",
            "source": os.path.realpath(source),
            "options": ["rbind", "ro", "nosuid"],
        }
        for inside, source in sources.items()
        if source.exists()
    ]


def _python_folders() -> list[Path]:
    """Where the virtual environment's interpreter lives; its links are followed by their own names."""
    interpreter = Path(sys.prefix) / "bin" / "python"
    candidates = {Path(sys.base_prefix), Path(os.path.realpath(interpreter)).parents[1]}
    if interpreter.is_symlink():
        candidates.add((interpreter.parent / interpreter.readlink()).parents[1])
    return sorted(
        folder for folder in candidates if not any(folder.is_relative_to(mounted) for mounted in _HOST_MOUNTS)
    )


def compile_code() -> None:
    """Compile this checkout's code, as an image has it: containers cannot, their mount is read-only."""
    for name in _CODE:
        compileall.compile_dir(repository_root() / name, quiet=1)


def write_archive(archive: Path) -> None:
    """One OCI archive with the pause image and every image of the product."""
    # A pod's own sandbox gets no bind mounts: its program is in the image.
    pause = _layer([Entry("pause", binary("pause").read_bytes())])
    images = [Image(PAUSE_IMAGE, pause, {"Entrypoint": ["/pause"]})]
    filled = _layer(_host_entries())
    for name in PRODUCT_IMAGES:
        config = {
            "Env": [f"{key}={value}" for key, value in _ENVIRONMENT.items()],
            "Cmd": ["/bin/sh"],
            # Makes the images differ, so that a node does not show one under another's name.
            "Labels": {"org.opencontainers.image.ref.name": name},
        }
        images.append(Image(name, filled, config))
    _write_oci(archive, images)


def _host_entries() -> list[Entry]:
    folders = (
        "usr",
        "bin",
        "sbin",
        "lib",
        "lib64",
        "etc",
        "dev",
        "proc",
        "sys",
        "run",
        "var",
        "root",
        "opt",
        "home",
    )
    entries = [Entry(path) for path in (*folders, "opt/phasesplit", "opt/phasesplit/bin", MODELS_MOUNT[1:])]
    entries.append(Entry("tmp", mode=0o1777))
    entries.append(Entry("etc/passwd", _PASSWD.encode(), 0o644))
    entries.append(Entry("etc/nsswitch.conf", b"passwd: files\nhosts: files dns\n", 0o644))
    for script in distribution("phasesplit").entry_points.select(group="console_scripts"):
        program = (
            f"#!{_VENV}/bin/python\n"
            f"import sys\n\nfrom {script.module} import {script.attr}\n\nsys.exit({script.attr}())\n"
        )
        entries.append(Entry(f"opt/phasesplit/bin/{script.name}", program.encode()))
    return entries


def _layer(entries: list[Entry]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode
            if entry.data is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))
    return raw.getvalue()


def _write_oci(archive: Path, images: list[Image]) -> None:
    blobs = []
    manifests = []
    for image in images:
        config = _json(
            {
                "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64"),
                "os": "linux",
                "config": image.config,
                "rootfs": {"type": "layers", "diff_ids": [_digest(image.layer)]},
            }
        )
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
                "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", image.layer)],
            }
        )
        blobs += [image.layer, config, manifest]
        manifests.append(
            {
                **_descriptor("application/vnd.oci.image.manifest.v1+json", manifest),
                "annotations": {"io.containerd.image.name": image.name},
            }
        )
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"})}
    files["index.json"] = _json({"schemaVersion": 2, "manifests": manifests})
    files |= {f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}": blob for blob in blobs}
    archive.write_bytes(_layer([Entry(path, data, 0o644) for path, data in files.items()]))


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _descriptor(media_type: str, data: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}

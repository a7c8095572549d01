"""The images: what a node's runtime will read."""

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

from testbed import images


def test_the_archive_is_whole_and_names_every_image(tmp_path: Path, monkeypatch) -> None:
    pause = tmp_path / "pause"
    pause.write_bytes(b"program")
    monkeypatch.setattr(images, "binary", lambda _: pause)
    images.write_archive(tmp_path / "images.tar")
    with tarfile.open(tmp_path / "images.tar") as archive:
        files = {info.name: archive.extractfile(info).read() for info in archive if info.isfile()}
    blobs = {name: data for name, data in files.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(data).hexdigest() == name.rpartition("/")[2] for name, data in blobs.items())
    manifests = json.loads(files["index.json"])["manifests"]
    names = [manifest["annotations"]["io.containerd.image.name"] for manifest in manifests]
    assert names == [images.PAUSE_IMAGE, *images.PRODUCT_IMAGES]
    assert len({manifest["digest"] for manifest in manifests}) == len(manifests)


def test_every_program_of_the_product_is_on_the_path() -> None:
    with tarfile.open(fileobj=io.BytesIO(images._layer(images._host_entries()))) as layer:
        modes = {info.name: info.mode for info in layer}
    for program in ("phasesplit", "phasesplit-operator", "phasesplit-router", "phasesplit-worker"):
        assert modes[f"opt/phasesplit/bin/{program}"] == 0o755


def test_containers_see_host_code_and_models_read_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PHASESPLIT_CACHE", str(tmp_path))
    mounts = {str(mount["destination"]): mount for mount in images.host_mounts()}
    assert all("ro" in mount["options"] for mount in mounts.values())
    assert mounts["/models"]["source"] == str((tmp_path / "models").resolve())
    assert mounts["/opt/phasesplit/venv"]["source"] == str(Path(sys.prefix).resolve())
    base = Path(sys.base_prefix)
    assert any(base.is_relative_to(destination) for destination in mounts)

"""The Go modules and what is taken from them."""

import re
from pathlib import Path

from testbed import binaries


def test_every_module_builds_what_is_expected_of_it() -> None:
    for module in binaries.MODULES:
        text = (Path(binaries.__file__).parent / "modules" / module.name / "go.mod").read_text()
        block = re.search(r"^tool \(\n(.*?)^\)", text, re.M | re.S)
        tools = block[1].split() if block else re.findall(r"^tool (\S+)$", text, re.M)
        # The last part of the path names the program, unless it is a version.
        names = {
            next(part for part in reversed(tool.split("/")) if not re.fullmatch(r"v\d+", part))
            for tool in tools
        }
        assert names == set(module.programs), module.name


def test_a_program_is_in_the_folder_of_its_module(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHASESPLIT_CACHE", str(tmp_path))
    assert binaries.binary("kubectl").parent == binaries.binary("kubelet").parent
    assert binaries.binary("etcd").parent.name.startswith("etcd-")
    assert binaries.binary("etcd").is_relative_to(tmp_path)

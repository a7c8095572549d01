"""The generated files are up to date, and the generator says so when they are not."""

import shutil
from pathlib import Path

import pytest

from helpers_resources import ROOT
from phasesplit.api import generate


def test_files_are_up_to_date() -> None:
    assert generate.find_stale(ROOT) == [], "run `make generate`"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository with what the generator reads and writes."""
    shutil.copytree(ROOT / "helm", tmp_path / "helm")
    shutil.copytree(ROOT / "crds", tmp_path / "crds")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_names_a_stale_file_and_writing_mends_it(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = copy / "helm" / "phasesplit" / "README.md"
    readme.write_text("old")
    assert generate.main(["--check"]) == 1
    assert "helm/phasesplit/README.md is not up to date: run `make generate`" in capsys.readouterr().err
    assert readme.read_text() == "old"
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_elsewhere_it_says_where_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert generate.main([]) == 2
    assert "run this from the root of the repository" in capsys.readouterr().err

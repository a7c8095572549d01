"""Rules about the tree itself that no linter knows."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from phasesplit.cli.main import app

ROOT = Path(__file__).resolve().parents[3]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", ["operator", "worker", "tests"])
def test_plain_folders_are_no_packages(folder: str) -> None:
    """`operator/__init__.py` would shadow the standard library; tests are imported by path."""
    found = list((ROOT / folder).glob("__init__.py"))
    if folder == "tests":
        found = list((ROOT / folder).rglob("__init__.py"))
    assert not found


def test_the_standard_library_operator_is_not_shadowed() -> None:
    done = subprocess.run(
        ["python3", "-c", "import operator, collections; operator.attrgetter"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_test_files_have_names_of_their_own() -> None:
    names = [Path(name).name for name in tracked() if re.match(r"tests/.*/test_.*\.py$", name)]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


def test_readme_paths_exist() -> None:
    text = (ROOT / "README.md").read_text()
    paths = re.findall(r"`((?:docs|manifests|helm|tests)/[\w./-]+|[A-Z]+\.md)`", text)
    assert paths
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_readme_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w%-]+):", makefile, re.MULTILINE))
    asked = set(re.findall(r"make ([a-z][\w-]*)", (ROOT / "README.md").read_text()))
    assert asked
    assert {name for name in asked if name not in targets and not name.startswith("bench-")} == set()


def test_readme_commands_of_the_cli_exist() -> None:
    """Every `phasesplit …` line of the README is a command that answers --help."""
    commands = re.findall(
        r"^(?:kubectl )?phasesplit ((?:[a-z]+ ?)+?)(?= chat|  |$)", (ROOT / "README.md").read_text(), re.M
    )
    assert commands
    for command in {words.strip() for words in commands}:
        done = CliRunner().invoke(app, [*command.split(), "--help"])
        assert done.exit_code == 0, f"{command}: {done.output}"
        assert "Examples" in done.output or command == "kv"


def test_samples_named_in_the_readme_are_the_object_shown_there() -> None:
    text = (ROOT / "README.md").read_text()
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL).group(1))
    sample = yaml.safe_load((ROOT / "manifests/samples/smallest.yaml").read_text())
    assert shown == sample


def test_a_second_try_knows_what_failed(pytestconfig: pytest.Config) -> None:
    """`make test` tries failed cluster tests once more; without the plugin it would run all of them again."""
    assert pytestconfig.pluginmanager.hasplugin("lfplugin")

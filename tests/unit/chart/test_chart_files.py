"""The chart's values, schema, README and the kustomize base say the same. No program is run."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from helpers_resources import ROOT
from phasesplit.api.chart_readme import read_values

CHART = ROOT / "helm" / "phasesplit"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())  # JSON is YAML
Node = dict[str, Any]


def resolve(node: Node) -> Node:
    if "$ref" in node:
        found = SCHEMA["definitions"][node["$ref"].rsplit("/", 1)[1]]
        assert isinstance(found, dict)
        return found
    return node


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(values, dict) and values and path[-1:] != ("resources",):
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, values


LEAVES = list(leaves(VALUES))
TYPES = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


@pytest.mark.parametrize(("path", "value"), LEAVES, ids=[".".join(path) for path, _ in LEAVES])
def test_every_value_is_in_the_schema_with_its_type(path: tuple[str, ...], value: Any) -> None:
    node = SCHEMA
    for key in path:
        node = resolve(node["properties"][key])
    assert isinstance(value, TYPES[node["type"]])
    assert value in node.get("enum", [value])


def test_schema_knows_no_value_that_the_chart_lacks() -> None:
    def check(node: Node, values: Node, path: str) -> None:
        for key, child in node.get("properties", {}).items():
            where = f"{path}.{key}"
            if where == ".global":
                continue
            if path.endswith(".resources"):
                continue
            assert key in values, where
            if isinstance(values[key], dict):
                check(resolve(child), values[key], where)

    check(SCHEMA, VALUES, "")


def test_unknown_values_are_refused() -> None:
    for node in [SCHEMA, *SCHEMA["properties"].values()]:
        if node.get("type") == "object" and "properties" in node:
            assert node["additionalProperties"] is False


def test_every_value_has_a_comment() -> None:
    described = {value.path for value in read_values((CHART / "values.yaml").read_text())}
    missing = {".".join(path) for path, _ in LEAVES} - described
    assert not missing


def test_chart_and_program_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
    assert chart["kubeVersion"] == ">=1.30.0-0"


def test_the_operators_pod_is_locked_down() -> None:
    deployment = yaml.safe_load((ROOT / "manifests" / "base" / "deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp"}
    assert container["resources"]["limits"] == {"memory": "256Mi"}
    assert {variable["name"] for variable in container["env"]} >= {"POD_ID", "PHASESPLIT_NAMESPACE"}


@pytest.mark.parametrize("name", ["operator", "worker"])
def test_images_run_as_nobody_special(name: str) -> None:
    text = (ROOT / name / "Dockerfile").read_text()
    assert "USER 65532:65532" in text
    assert text.count("FROM ") == 2
    assert "--frozen" in text
    assert ("--extra worker" in text) == (name == "worker")

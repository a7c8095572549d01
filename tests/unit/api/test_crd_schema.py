"""The generated CustomResourceDefinition is structural, bounded, described and up to date."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field

from helpers_resources import MINIMAL, ROOT, sample_names
from phasesplit.api import crd
from phasesplit.api.names import Pool
from phasesplit.api.status import DisaggregatedModelStatus, PoolStatus
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Quantity

CRD_FILE = ROOT / "crds" / "phasesplit.dev_disaggregatedmodels.yaml"
FORBIDDEN = {"$ref", "$defs", "const", "title", "anyOf", "oneOf", "allOf", "definitions", "discriminator"}
Node = dict[str, Any]


def root() -> Node:
    schema = crd.build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert isinstance(schema, dict)
    return schema


def nodes(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}[]")


ALL_NODES = list(nodes(root()))


def test_small_enough_for_client_side_apply() -> None:
    assert len(crd.dump_crd()) < 200_000


@pytest.mark.parametrize(("path", "node"), ALL_NODES, ids=[path or "root" for path, _ in ALL_NODES])
def test_every_node_is_structural_and_bounded(path: str, node: Node) -> None:
    assert not FORBIDDEN & node.keys()
    if path not in (".metadata",):
        assert node.get("description") or path.endswith("[]")
    if "x-kubernetes-int-or-string" in node:
        assert "type" not in node
        return
    kind = node["type"]
    assert kind in ("object", "array", "string", "integer", "number", "boolean")
    if kind == "string" and path not in (".apiVersion", ".kind"):
        assert "maxLength" in node or "enum" in node
    if kind == "array":
        assert "maxItems" in node
        assert node["x-kubernetes-list-type"] in ("atomic", "set", "map")
    if kind == "object" and path != ".metadata":
        ways = ("properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields")
        assert sum(way in node for way in ways) == 1
        assert node.get("additionalProperties") not in (True, False)
    for bound in ("exclusiveMinimum", "exclusiveMaximum"):
        assert isinstance(node.get(bound, True), bool)


def test_list_map_keys_are_there_in_every_item() -> None:
    for path, node in ALL_NODES:
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path


def test_rules_have_sentences() -> None:
    rules = [rule for _, node in ALL_NODES for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 9
    for rule in rules:
        assert len(rule["message"]) > 20
        assert "\n" not in rule["message"]


def test_defaults_are_those_of_the_models() -> None:
    """Filling the schema's defaults into the smallest object gives the model's own values."""
    filled = apply_defaults(MINIMAL, root()["properties"]["spec"])
    assert DisaggregatedModelSpec.model_validate(filled) == DisaggregatedModelSpec.model_validate(MINIMAL)


def apply_defaults(value: Any, schema: Node) -> Any:
    """What the API server does with `default`."""
    if isinstance(value, dict) and "properties" in schema:
        filled = dict(value)
        for name, child in schema["properties"].items():
            if name not in filled and "default" in child:
                filled[name] = child["default"]
            if name in filled:
                filled[name] = apply_defaults(filled[name], child)
        return filled
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [apply_defaults(item, schema["items"]) for item in value]
    return value


def test_status_is_open_to_new_reasons() -> None:
    status = root()["properties"]["status"]
    for path, node in nodes(status):
        assert "enum" not in node or path.endswith(".status"), path


def test_status_leaves_out_what_is_unknown() -> None:
    status = DisaggregatedModelStatus(observed_generation=2, pools=[PoolStatus(name=Pool.PREFILL, desired=1)])
    assert status.to_manifest() == {
        "observedGeneration": 2,
        "pools": [
            {"name": "prefill", "desired": 1, "ready": 0, "updated": 0, "gpus": 0, "nodes": [], "summary": ""}
        ],
        "slo": [],
        "conditions": [],
    }


def test_printer_columns_point_at_fields() -> None:
    paths = {path for path, _ in ALL_NODES}
    for column in crd.PRINTER_COLUMNS:
        field = column["jsonPath"].split("[?")[0]
        assert field in paths or field.startswith(".metadata."), column


def test_header_says_where_the_file_comes_from() -> None:
    assert CRD_FILE.read_text().startswith("# Generated from ")
    assert yaml.safe_load(CRD_FILE.read_text()) == crd.build_crd()


class Colour(StrEnum):
    RED = "Red"


class Inner(BaseModel):
    """Inner."""

    a: Annotated[int, Field(gt=0, description="A.")] = 1


class Everything(BaseModel):
    """Each construct that pydantic writes in its own way."""

    optional: Annotated[int | None, Field(ge=1, description="Optional.")] = None
    nested: Annotated[Inner, Field(description="Nested.")] = Inner()
    maybe: Annotated[Inner | None, Field(description="Maybe.")] = None
    literal: Annotated[Literal["x"], Field(description="Literal.")] = "x"
    colour: Annotated[Colour, Field(description="Colour.")] = Colour.RED
    free: Annotated[dict[str, Any], Field(description="Free.")] = {}
    labels: Annotated[
        dict[str, Annotated[str, Field(max_length=3)]], Field(max_length=2, description="L.")
    ] = {}
    size: Annotated[Quantity, Field(description="Size.")]


def test_converter() -> None:
    schema = crd.to_structural(Everything)
    assert schema["required"] == ["size"]
    fields = schema["properties"]
    assert fields["optional"] == {"type": "integer", "description": "Optional.", "minimum": 1}
    assert fields["nested"]["default"] == {}
    assert fields["nested"]["description"] == "Nested."
    assert fields["nested"]["properties"]["a"] == {
        "type": "integer", "description": "A.", "default": 1, "minimum": 0, "exclusiveMinimum": True,
    }  # fmt: skip
    assert "default" not in fields["maybe"]
    assert fields["literal"]["enum"] == ["x"]
    assert fields["colour"]["enum"] == ["Red"]
    assert fields["free"] == {
        "type": "object",
        "description": "Free.",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    assert fields["labels"]["additionalProperties"] == {"type": "string", "maxLength": 3}
    assert fields["labels"]["maxProperties"] == 2
    assert fields["size"]["x-kubernetes-int-or-string"] is True
    assert fields["size"]["pattern"].startswith("^[0-9]+")


def test_union_of_two_types_is_refused() -> None:
    class Either(BaseModel):
        """Either."""

        value: int | str = 1

    with pytest.raises(TypeError, match="no structural schema"):
        crd.to_structural(Either)


def test_full_sample_uses_every_field_of_the_spec() -> None:
    assert "full" in sample_names()
    sample = yaml.safe_load((ROOT / "manifests" / "samples" / "full.yaml").read_text())
    alternatives = {".model.source.volume", ".model.source.path"}
    for path, node in nodes(root()["properties"]["spec"]):
        if not path or any(path.startswith(alternative) for alternative in alternatives):
            continue
        if path.startswith(".decode") or node.get("x-kubernetes-preserve-unknown-fields"):
            continue
        assert has_path(sample["spec"], path), f"spec{path} is missing in the full sample"


def has_path(value: Any, path: str) -> bool:
    for part in path.strip(".").split("."):
        name, in_list = part.removesuffix("[]"), part.endswith("[]")
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
        if in_list:
            value = next(iter(value.values() if isinstance(value, dict) else value))
    return True

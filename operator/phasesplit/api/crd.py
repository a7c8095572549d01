"""From the pydantic models to the CustomResourceDefinition.

pydantic writes JSON Schema with `$ref`, `anyOf` with null, `const`, numeric `exclusiveMinimum` and
`title`; a structural schema has none of these. The rest (CEL rules, list types) comes through from
`json_schema_extra` on the models.
"""

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from phasesplit.api import names
from phasesplit.api.status import DisaggregatedModelStatus
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec

Schema = dict[str, Any]

CRD_NAME = f"{names.PLURAL}.{names.GROUP}"
# The operator compares this with the installed CRD's, and says so when it meets an older one.
ANNOTATION_SCHEMA_VERSION = f"{names.GROUP}/schema-version"
SCHEMA_VERSION = 2
HEADER = "# Generated from operator/phasesplit/api by `make generate`; do not edit.\n"

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_REMEDY = "start with a lower-case letter and use only lower-case letters, digits and dashes"
MAX_ENUM_LENGTH = 64

# Keywords that mean the same in both; everything else is translated or dropped below.
_KEPT = (
    "type",
    "description",
    "default",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-validations",
)


def to_structural(model: type[BaseModel], *, open_enums: bool = False) -> Schema:
    """The model as a structural schema. `open_enums` turns enums into bounded strings."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}), open_enums)


def _convert(node: Schema, definitions: Mapping[str, Schema], open_enums: bool) -> Schema:
    node = _resolve(node, definitions)
    result: Schema = {key: node[key] for key in _KEPT if key in node}
    if "const" in node:
        result["enum"] = [node["const"]]
        result["type"] = "string"
    for bound in ("Minimum", "Maximum"):
        if f"exclusive{bound}" in node:
            result[bound.lower()] = node[f"exclusive{bound}"]
            result[f"exclusive{bound}"] = True
    if open_enums and "enum" in result:
        del result["enum"]
        result["maxLength"] = MAX_ENUM_LENGTH
    if "x-kubernetes-int-or-string" in result:
        del result["type"]
    if "items" in node:
        result["items"] = _convert(node["items"], definitions, open_enums)
        result.setdefault("x-kubernetes-list-type", "atomic")
    if result.get("type") == "object":
        _convert_object(node, result, definitions, open_enums)
    _simplify_default(result)
    return result


def _resolve(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Follow `$ref` and the optional's `anyOf`; what stands beside them wins over what they name."""
    while "$ref" in node or "anyOf" in node:
        beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
        if "$ref" in node:
            target = definitions[node["$ref"].rsplit("/", 1)[1]]
        else:
            choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
            if len(choices) != 1:
                raise TypeError(f"a union of {len(choices)} types has no structural schema: {node}")
            target = choices[0]
        node = {**target, **beside}
    return node


def _convert_object(
    node: Schema, result: Schema, definitions: Mapping[str, Schema], open_enums: bool
) -> None:
    if "properties" in node:
        result["properties"] = {
            name: _convert(child, definitions, open_enums) for name, child in node["properties"].items()
        }
        return
    values = node.get("additionalProperties", True)
    if isinstance(values, dict) and values:
        result["additionalProperties"] = _convert(values, definitions, open_enums)
    else:
        result["x-kubernetes-preserve-unknown-fields"] = True


def _simplify_default(result: Schema) -> None:
    """Absent says the same as null or empty; an object's default comes from its own fields.

    Where rules stand on the object itself its default is whole: the API server evaluates them on a
    default before it fills that default in.
    """
    if "default" not in result:
        return
    if isinstance(result["default"], dict) and "properties" in result:
        if "x-kubernetes-validations" not in result:
            result["default"] = {}
    elif result["default"] in (None, {}, [], ""):
        del result["default"]


def _column(name: str, kind: str, path: str, description: str, priority: int = 0) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


PRINTER_COLUMNS = [
    _column("Mode", "string", ".status.mode", "Mode served now."),
    _column(
        "Ready",
        "string",
        '.status.conditions[?(@.type=="Ready")].status',
        "Does the current generation serve?",
    ),
    _column(
        "Prefill", "string", '.status.pools[?(@.name=="prefill")].summary', "Ready over desired workers."
    ),
    _column("Decode", "string", '.status.pools[?(@.name=="decode")].summary', "Ready over desired workers."),
    _column("TTFT", "number", ".status.measures.ttftMilliseconds", "Time to the first token, ms."),
    _column("TPOT", "number", ".status.measures.tpotMilliseconds", "Time per output token, ms."),
    _column("SLO %", "number", ".status.measures.attainmentPercent", "Requests that met every target."),
    _column("Reason", "string", ".status.decision.reason", "Why this mode.", priority=1),
    _column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
]

_NAME_RULES = [
    {
        "rule": f"self.metadata.name.matches('{NAME_PATTERN}')",
        "message": f"metadata.name becomes a Service name; {NAME_REMEDY}",
        "messageExpression": "'metadata.name is %s, but it becomes a Service name; "
        f"{NAME_REMEDY}'.format([self.metadata.name])",
    },
    {
        "rule": f"self.metadata.name.size() <= {names.MAX_NAME_LENGTH}",
        "message": f"metadata.name must have at most {names.MAX_NAME_LENGTH} characters",
        "messageExpression": "'metadata.name has %d characters; children add suffixes to it, so use at most "
        f"{names.MAX_NAME_LENGTH}'.format([self.metadata.name.size()])",
    },
]


def build_crd() -> Schema:
    """The CustomResourceDefinition as a plain dict."""
    spec = to_structural(DisaggregatedModelSpec)
    status = to_structural(DisaggregatedModelStatus, open_enums=True)
    root = {
        "type": "object",
        "description": "A language model served in two pools, or colocated where that is better.",
        "required": ["spec"],
        "x-kubernetes-validations": _NAME_RULES,
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this representation."},
            "kind": {"type": "string", "description": f"Always {names.KIND}."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME, "annotations": {ANNOTATION_SCHEMA_VERSION: str(SCHEMA_VERSION)}},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": PRINTER_COLUMNS,
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


class _PlainDumper(yaml.SafeDumper):
    """Writes shared parts out each time: anchors are hard to read and some tools refuse them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_crd() -> str:
    """The CRD as the text of its file."""
    return HEADER + yaml.dump(build_crd(), Dumper=_PlainDumper, sort_keys=False, width=110)


def dump_chart_template() -> str:
    """The CRD as a template of the chart, which installs and keeps it by two values."""
    text = dump_crd()
    annotation = f"    {ANNOTATION_SCHEMA_VERSION}: '{SCHEMA_VERSION}'\n"
    keep = "    {{- if .Values.crds.keep }}\n    helm.sh/resource-policy: keep\n    {{- end }}\n"
    if annotation not in text:
        raise ValueError(f"the CRD has no annotation {ANNOTATION_SCHEMA_VERSION} to stand beside")
    return "{{- if .Values.crds.enabled }}\n" + text.replace(annotation, annotation + keep) + "{{- end }}\n"

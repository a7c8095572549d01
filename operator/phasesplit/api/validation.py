"""What the operator refuses in a spec: what the schema refuses, and what no schema can tell.

The API server has checked schema and CEL rules already; they are checked again here, because an
object may be older than the rules. Each problem is one sentence that names field, value and remedy.
Pure: what the cluster holds is passed in.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from phasesplit.api import names
from phasesplit.api.flags import OWNED_FLAGS, find_owned_flag
from phasesplit.api.names import Pool
from phasesplit.api.quantities import parse_quantity
from phasesplit.api.template_rules import find_template_problems
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, EngineType

NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MANY_NODES = ("ReadWriteMany", "ReadOnlyMany")
ONE_POD = "ReadWriteOncePod"


@dataclass(frozen=True)
class Problem:
    """One reason to refuse a spec."""

    field: str
    value: str
    message: str

    def __str__(self) -> str:
        return self.message


class InvalidSpec(ValueError):  # noqa: N818 - it names what is wrong, not that something went wrong
    """A spec that the operator refuses."""

    def __init__(self, problems: Collection[Problem]) -> None:
        super().__init__(" ".join(f"{problem.message}." for problem in problems))
        self.problems = tuple(problems)


def parse_spec(name: str, raw: Mapping[str, Any]) -> DisaggregatedModelSpec:
    """The spec as a model; raises InvalidSpec with every problem found."""
    try:
        spec = DisaggregatedModelSpec.model_validate(raw)
    except ValidationError as error:
        raise InvalidSpec([_to_problem(detail) for detail in error.errors()]) from None
    problems = find_problems(name, spec)
    if problems:
        raise InvalidSpec(problems)
    return spec


def find_problems(name: str, spec: DisaggregatedModelSpec) -> tuple[Problem, ...]:
    """Problems between fields of a spec whose types and bounds are right."""
    return tuple(
        Problem(field, value, f"{field} is {value}, {remedy}" if value else f"{field} {remedy}")
        for check in _CHECKS
        for field, value, remedy in check(name, spec)
    )


def find_claim_problem(
    spec: DisaggregatedModelSpec, access_modes: Collection[str], nodes: Collection[str], workers: int
) -> Problem | None:
    """A claim that cannot be mounted where the workers are to run.

    `nodes` are those chosen for the workers, `workers` how many there are in all.
    """
    volume = spec.model.source.volume
    if volume is None or not access_modes or any(mode in MANY_NODES for mode in access_modes):
        return None
    alone = ONE_POD in access_modes and workers > 1
    if not alone and len(set(nodes)) <= 1:
        return None
    modes = ", ".join(sorted(access_modes))
    where = f"{workers} workers" if alone else f"nodes {', '.join(sorted(set(nodes)))}"
    field = "spec.model.source.volume.claimName"
    return Problem(
        field,
        volume.claim_name,
        f"{field} is {volume.claim_name}, a claim of access mode {modes} that {where} need at once; "
        "use a ReadWriteMany or ReadOnlyMany claim, or keep both pools on one node with nodeSelector",
    )


# A check yields (field, value, what is wrong and what to do); an empty value is left out of the sentence.
_Finding = tuple[str, str, str]
_Check = Callable[[str, DisaggregatedModelSpec], Iterable[_Finding]]


def _check_name(name: str, _: DisaggregatedModelSpec) -> Iterator[_Finding]:
    if NAME_PATTERN.fullmatch(name) is None:
        remedy = (
            "but it becomes a Service name; start with a lower-case letter and use only lower-case letters"
        )
        yield "metadata.name", name, f"{remedy}, digits and dashes"
    if len(name) > names.MAX_NAME_LENGTH:
        remedy = f"which has {len(name)} characters; children add suffixes to it, so use at most"
        yield "metadata.name", name, f"{remedy} {names.MAX_NAME_LENGTH}"


def _check_source(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    source = spec.model.source
    given = [source.hugging_face, source.volume, source.path]
    count = sum(choice is not None for choice in given)
    if count != 1:
        remedy = f"has {count} sources; set exactly one of huggingFace, volume and path"
        yield "spec.model.source", "", remedy
    if spec.model.cache is not None and source.hugging_face is None:
        remedy = "keeps downloads and needs spec.model.source.huggingFace; remove cache, the source is local"
        yield "spec.model.cache", "", f"{remedy} already"
    if source.volume is not None and ".." in source.volume.path.split("/"):
        yield "spec.model.source.volume.path", source.volume.path, "which leaves the volume; remove the `..`"


def _check_replicas(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    for pool in Pool:
        replicas = spec.pool(pool).replicas
        if replicas.min > replicas.max:
            remedy = f"above spec.{pool}.replicas.max {replicas.max}; lower min or raise max"
            yield f"spec.{pool}.replicas.min", str(replicas.min), remedy


def _check_gpus(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    for pool in Pool:
        gpu = spec.pool(pool).gpu
        if spec.engine.type is EngineType.TORCH and gpu.count > 1:
            remedy = "but the engine Torch takes 0 or 1; set it to 1 and raise replicas instead"
            yield f"spec.{pool}.gpu.count", str(gpu.count), remedy
    least = sum(spec.pool(pool).replicas.min * spec.pool(pool).gpu.count for pool in Pool)
    limit = spec.scaling.max_gpus
    if limit is not None and least > limit:
        remedy = f"but replicas.min of both pools need {least} GPUs; raise maxGPUs or lower min"
        yield "spec.scaling.maxGPUs", str(limit), remedy


def _check_resources(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    sections = [(f"spec.{pool}.resources", spec.pool(pool).resources) for pool in Pool]
    sections.append(("spec.router.resources", spec.router.resources))
    for field, resources in sections:
        for kind in ("requests", "limits"):
            values = resources.get(kind) or {}
            if not isinstance(values, dict):
                yield f"{field}.{kind}", str(values), "but must map resource names to quantities"
                continue
            yield from _check_quantities(f"{field}.{kind}", values)
    for pool in Pool:
        resource = spec.pool(pool).gpu.resource_name
        limits = spec.pool(pool).resources.get("limits")
        if isinstance(limits, dict) and resource in limits:
            remedy = f"but GPUs are set with spec.{pool}.gpu.count; remove it here"
            yield f"spec.{pool}.resources.limits[{resource}]", str(limits[resource]), remedy


def _check_quantities(field: str, values: Mapping[str, Any]) -> Iterator[_Finding]:
    for resource, value in values.items():
        try:
            parse_quantity(value)
        except ValueError:
            yield (
                f"{field}[{resource}]",
                str(value),
                "no Kubernetes quantity; write for example 500m, 2 or 8Gi",
            )


def _check_arguments(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    for argument in spec.engine.args:
        owned = find_owned_flag(argument)
        if owned is not None:
            remedy = f"but {owned} is set by the operator from {OWNED_FLAGS[owned]}; remove it here"
            yield "spec.engine.args", argument, remedy


def _check_classes(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    seen: set[str] = set()
    for target in spec.slo:
        if target.name in seen:
            yield "spec.slo[].name", target.name, "used by two classes; give each a name of its own"
        seen.add(target.name)


def _check_transports(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    transports = list(spec.transfer.transports)
    for transport in dict.fromkeys(transports):
        if transports.count(transport) > 1:
            yield "spec.transfer.transports", ", ".join(transports), f"with {transport} twice; name each once"


def _check_templates(_: str, spec: DisaggregatedModelSpec) -> Iterator[_Finding]:
    for pool in Pool:
        yield from find_template_problems(f"spec.{pool}.template", spec.pool(pool).template)


_CHECKS: tuple[_Check, ...] = (
    _check_name,
    _check_source,
    _check_replicas,
    _check_gpus,
    _check_resources,
    _check_arguments,
    _check_classes,
    _check_transports,
    _check_templates,
)


def _to_problem(detail: Any) -> Problem:
    """pydantic's error as a sentence about a field."""
    field = "spec"
    for part in detail["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    if detail["type"] == "missing":
        return Problem(field, "", f"{field} is missing; set it")
    value = detail["input"]
    shown = str(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    complaint = str(detail["msg"])
    return Problem(field, shown, f"{field} is {shown}; {complaint[:1].lower()}{complaint[1:]}")

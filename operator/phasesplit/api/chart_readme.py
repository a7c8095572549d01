"""The README of the chart: its values, their defaults and the comments above them.

Reads values.yaml line by line, because YAML parsers drop comments. Knows the layout that file keeps:
two spaces per level, a comment directly above the key that it is about. Texts in, text out.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):(.*)$")

HEAD = """\
<!-- Generated from values.yaml by `make generate`; do not edit. -->

# phasesplit {version}

{description}.

```sh
helm install phasesplit helm/phasesplit --namespace phasesplit-system --create-namespace
```

Needs Kubernetes {kubernetes}. The CustomResourceDefinition is installed and upgraded with the chart.
Unless `crds.keep` is false it stays when the chart is uninstalled. One that was applied by hand is taken
over with `helm install --take-ownership`. Before an uninstall a Job lifts the placement gates of pods that
still wait for a node.

The default images are those of this version's release. Images of your own, made by `make images`, are named
with `images.control` and `images.worker`.

## Values

| value | default | meaning |
|---|---|---|
"""


@dataclass(frozen=True)
class Value:
    """One row of the table."""

    path: str
    default: Any
    meaning: str


def read_values(text: str) -> Iterator[Value]:
    """Every value that has a comment, in the file's order."""
    loaded = yaml.safe_load(text)
    comment: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
            continue
        found = KEY.match(line)
        if found is None:
            comment = []
            continue
        path = [*path[: len(found.group(1)) // 2], found.group(2)]
        if comment:
            yield Value(".".join(path), _find(loaded, path), " ".join(comment))
        comment = []


def _find(loaded: Any, path: list[str]) -> Any:
    for key in path:
        loaded = loaded[key]
    return loaded


def render_readme(chart_text: str, values_text: str) -> str:
    """The whole README, from Chart.yaml and values.yaml."""
    chart = yaml.safe_load(chart_text)
    head = HEAD.format(
        version=chart["version"],
        description=chart["description"],
        kubernetes=chart["kubeVersion"].removesuffix("-0").replace(">=", "") + " or newer",
    )
    rows = [
        f"| `{value.path}` | `{json.dumps(value.default)}` | {value.meaning} |"
        for value in read_values(values_text)
    ]
    return head + "\n".join(rows) + "\n"

"""`phasesplit status`: what is served, how, and why."""

from typing import Annotated, Any

import typer
from rich.table import Table

from phasesplit.cli.options import Context, Namespace, Output
from phasesplit.cli.output import OutputFormat, console, print_json, rate_text
from phasesplit.cluster.inspection import Inspector

EPILOG = (
    "Examples:\n\n  phasesplit status\n\n  phasesplit status chat -n voice\n\n"
    "  phasesplit status -A --output json | jq '.[].status.mode'"
)


def status(
    name: Annotated[str | None, typer.Argument(help="One object; absent lists all of the namespace.")] = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List every namespace.")
    ] = False,
    context: Context = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show DisaggregatedModels: mode, readiness, pools, latencies and the reason for the mode."""
    inspector = Inspector(context)
    where = None if all_namespaces else namespace or inspector.default_namespace
    if name is not None:
        model = inspector.model(namespace or inspector.default_namespace, name)
        print_json(model) if output is OutputFormat.JSON else _print_one(model)
        return
    models = inspector.models(where)
    if output is OutputFormat.JSON:
        print_json(models)
    elif not models:
        console.print(
            "No DisaggregatedModel found."
            if where is None
            else f"No DisaggregatedModel in namespace {where}."
        )
    else:
        console.print(_list_table(models))


def _list_table(models: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in (
        "NAMESPACE",
        "NAME",
        "MODE",
        "READY",
        "PREFILL",
        "DECODE",
        "TTFT",
        "TPOT",
        "SLO %",
        "REASON",
    ):
        table.add_column(heading)
    for model in models:
        state = model.get("status", {})
        slo = _tightest(state)
        table.add_row(
            model["metadata"]["namespace"],
            model["metadata"]["name"],
            state.get("mode", "-"),
            condition_of(state, "Ready").get("status", "Unknown"),
            _pool_text(state, "prefill"),
            _pool_text(state, "decode"),
            _number(slo.get("ttftMilliseconds"), " ms"),
            _number(slo.get("tpotMilliseconds"), " ms"),
            _number(slo.get("attainmentPercent")),
            state.get("decision", {}).get("reason", "-"),
        )
    return table


def _print_one(model: dict[str, Any]) -> None:
    state = model.get("status", {})
    meta = model["metadata"]
    decision = state.get("decision", {})
    console.print(
        f"[bold]{meta['namespace']}/{meta['name']}[/bold]  "
        f"serves [bold]{state.get('mode', 'nothing yet')}[/bold]"
    )
    if decision:
        console.print(
            f"  because {decision.get('reason', '?')} since {decision.get('since', '?')}: "
            f"{decision.get('message', '')}"
        )
    console.print(pools_table(state))
    if state.get("slo"):
        console.print(_slo_table(state["slo"]))
    links = state.get("links", {})
    if links:
        console.print(
            f"Link ({links.get('transport', '?')}): median {rate_text(links.get('medianBytesPerSecond'))}, "
            f"worst {rate_text(links.get('worstBytesPerSecond'))} {_pair_text(links.get('worstPair'))}"
        )
    console.print(conditions_table(state))


def pools_table(state: dict[str, Any]) -> Table:
    """Pools of one object."""
    table = Table("POOL", "DESIRED", "READY", "UPDATED", "GPUS", "NODES", box=None, header_style="bold")
    for pool in state.get("pools", []):
        table.add_row(
            pool["name"],
            *(str(pool.get(key, "-")) for key in ("desired", "ready", "updated", "gpus")),
            ", ".join(pool.get("nodes", [])),
        )
    return table


def conditions_table(state: dict[str, Any]) -> Table:
    """Conditions of one object."""
    table = Table("CONDITION", "STATUS", "REASON", "MESSAGE", box=None, header_style="bold")
    colours = {"True": "green", "False": "red", "Unknown": "yellow"}
    for condition in state.get("conditions", []):
        # Reconciling and Stalled are good news when False; the rest when True.
        status_text = condition["status"]
        inverted = condition["type"] in {"Reconciling", "Stalled"}
        shown = {"True": "False", "False": "True"}.get(status_text, status_text) if inverted else status_text
        table.add_row(
            condition["type"],
            f"[{colours.get(shown, 'white')}]{status_text}[/]",
            condition.get("reason", ""),
            condition.get("message", ""),
        )
    return table


def _slo_table(classes: list[dict[str, Any]]) -> Table:
    table = Table("CLASS", "ATTAINED", "TTFT", "TPOT", box=None, header_style="bold")
    for item in classes:
        table.add_row(
            item["name"],
            _number(item.get("attainmentPercent"), " %"),
            _number(item.get("ttftMilliseconds"), " ms"),
            _number(item.get("tpotMilliseconds"), " ms"),
        )
    return table


def condition_of(state: dict[str, Any], kind: str) -> dict[str, Any]:
    """The condition of that type, or an empty dict."""
    found: dict[str, Any] = next((item for item in state.get("conditions", []) if item["type"] == kind), {})
    return found


def _tightest(state: dict[str, Any]) -> dict[str, Any]:
    """The class that is met least."""
    classes: list[dict[str, Any]] = state.get("slo", [])
    return min(classes, key=lambda item: item.get("attainmentPercent", 100), default={})


def _pool_text(state: dict[str, Any], name: str) -> str:
    pool = next((item for item in state.get("pools", []) if item["name"] == name), None)
    return "-" if pool is None else f"{pool.get('ready', 0)}/{pool.get('desired', 0)}"


def _pair_text(pair: dict[str, Any] | None) -> str:
    return f"({pair.get('from')} to {pair.get('to')})" if pair else ""


def _number(value: Any, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.0f}{unit}"

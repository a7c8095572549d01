"""`phasesplit explain`: why this mode, why these nodes, why this many workers."""

from typing import Annotated, Any

import typer
from rich.table import Table

from phasesplit.cli.options import Context, Namespace, Output
from phasesplit.cli.output import OutputFormat, console, print_json, rate_text
from phasesplit.cli.status import condition_of, pools_table
from phasesplit.cluster.errors import ClusterError
from phasesplit.cluster.inspection import Inspector

EPILOG = "Examples:\n\n  phasesplit explain chat\n\n  phasesplit explain chat -n voice --output json"


def explain(
    name: Annotated[str, typer.Argument(help="The DisaggregatedModel.")],
    namespace: Namespace = None,
    context: Context = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Say why the operator serves this object as it does, with the numbers it decided on."""
    inspector = Inspector(context)
    where = namespace or inspector.default_namespace
    model = inspector.model(where, name)
    answer = explanation(model)
    try:
        answer["now"] = inspector.router_report(where, name).model_dump(mode="json")
    except ClusterError as error:
        answer["now"] = {"error": str(error)}
    print_json(answer) if output is OutputFormat.JSON else _print(answer, model.get("status", {}))


def explanation(model: dict[str, Any]) -> dict[str, Any]:
    """What status holds about each decision, question by question."""
    state = model.get("status", {})
    evidence = state.get("evidence", {})
    return {
        "object": f"{model['metadata']['namespace']}/{model['metadata']['name']}",
        "wanted": model["spec"].get("mode", "Auto"),
        "served": state.get("mode"),
        "whyThisMode": state.get("decision", {}),
        "evidence": {
            key: value for key, value in evidence.items() if key not in ("checks", "flips", "trial")
        },
        "checks": evidence.get("checks", []),
        "whatWouldTurnIt": evidence.get("flips", []),
        "trial": evidence.get("trial", {}),
        "splitBeneficial": condition_of(state, "SplitBeneficial"),
        "whyTheseNodes": state.get("placement", {}),
        "whyThisMany": state.get("pools", []),
        "links": state.get("links", {}),
        "measures": state.get("measures", {}),
    }


def _print(answer: dict[str, Any], state: dict[str, Any]) -> None:
    decision = answer["whyThisMode"]
    console.print(
        f"[bold]{answer['object']}[/bold]: asked for {answer['wanted']}, "
        f"served {answer['served'] or 'not yet'}"
    )
    console.print(
        "\n[bold]Why this mode[/bold]\n"
        f"  {decision.get('reason', 'not decided yet')}: {decision.get('message', '')}"
    )
    split = answer["splitBeneficial"]
    if split:
        console.print(
            f"  Does the split pay? {split['status']} ({split.get('reason', '')}): {split.get('message', '')}"
        )
    if answer["checks"]:
        console.print(checks_table(answer["checks"]))
    if answer["evidence"]:
        console.print(f"  {evidence_source(answer['evidence'])}")
        console.print(_facts_table(answer["evidence"]))
    if answer["trial"]:
        console.print(f"  {trial_sentence(answer['trial'])}")
    _print_list("What would turn it", [flip["message"] for flip in answer["whatWouldTurnIt"]])
    console.print(
        f"\n[bold]Why these nodes[/bold]\n  {answer['whyTheseNodes'].get('message', 'nothing placed yet')}"
    )
    links = answer["links"]
    if links:
        console.print(
            f"  worst link {rate_text(links.get('worstBytesPerSecond'))}, "
            f"measured {links.get('measuredAt', '?')}"
        )
    console.print("\n[bold]Why this many[/bold]")
    console.print(pools_table(state))
    for pool in answer["whyThisMany"]:
        if pool.get("message"):
            console.print(f"  {pool['name']}: {pool['message']}")
    if "error" in answer["now"]:
        console.print(f"\n[yellow]The router could not be asked: {answer['now']['error']}[/yellow]")


def checks_table(checks: list[dict[str, Any]]) -> Table:
    """The list that a split must pass, with what is in the way."""
    table = Table("A SPLIT NEEDS", "HOLDS", "", box=None, header_style="bold")
    for check in checks:
        holds = "[green]yes[/]" if check.get("passed") else "[red]no[/]"
        table.add_row(check["name"], holds, check.get("message", ""))
    return table


def evidence_source(evidence: dict[str, Any]) -> str:
    """Where the numbers come from, in one sentence."""
    if evidence.get("source") == "Replay":
        return (
            f"The last {evidence.get('requests', '?')} requests were served again on paper, both ways, "
            f"at {evidence.get('replayedAt', '?')}."
        )
    if evidence.get("source") == "ClosedForm":
        problem = f" ({evidence['problem']})" if evidence.get("problem") else ""
        return f"Both ways are predicted by a formula until enough requests can be replayed{problem}."
    return "Both ways cannot be compared yet."


def trial_sentence(trial: dict[str, Any]) -> str:
    """What was measured on real requests."""
    state = "A trial on real requests is running" if trial.get("running") else "The last trial"
    parts = [
        f"{name} {arm.get('attained', 0)} of {arm.get('requests', 0)} in target"
        for name, arm in (("split", trial.get("split")), ("colocated", trial.get("colocated")))
        if arm
    ]
    text = f"{state}: {', '.join(parts) or 'nothing counted yet'}."
    if trial.get("failures"):
        text += f" {trial['failures']} in a row did not confirm the split;"
        text += f" next after {trial.get('notBefore', '?')}."
    return text


def _print_list(title: str, lines: list[str]) -> None:
    if lines:
        console.print(f"\n[bold]{title}[/bold]")
    for line in lines:
        console.print(f"  {line}")


def _facts_table(facts: dict[str, Any], prefix: str = "") -> Table:
    table = Table("EVIDENCE", "VALUE", box=None, header_style="bold")
    for key, value in _flat(facts, prefix):
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
    return table


def _flat(facts: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        path = f"{prefix}{key}"
        rows += _flat(value, f"{path}.") if isinstance(value, dict) else [(path, value)]
    return rows

"""`phasesplit kv inspect`: where one request's KV was made, how it travelled, what it cost."""

from typing import Annotated

import typer
from rich.table import Table

from phasesplit.api.reports import KVTrace
from phasesplit.cli.options import Context, Namespace, Output
from phasesplit.cli.output import OutputFormat, bytes_text, console, milliseconds, print_json, rate_text
from phasesplit.cluster.inspection import Inspector

EPILOG = (
    "Examples:\n\n  phasesplit kv inspect chat last\n\n  phasesplit kv inspect chat 5f1c0a9e --output json"
)

app = typer.Typer(help="Look at the KV cache of requests.", no_args_is_help=True)


@app.command(epilog=EPILOG)
def inspect(
    name: Annotated[str, typer.Argument(help="The DisaggregatedModel.")],
    request_id: Annotated[str, typer.Argument(help="Value of the answer's x-request-id header, or `last`.")],
    namespace: Namespace = None,
    context: Context = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show one recent request: pods and nodes of both phases, KV bytes, transfer, latencies."""
    inspector = Inspector(context)
    trace = inspector.trace(namespace or inspector.default_namespace, name, request_id)
    print_json(trace.model_dump(mode="json")) if output is OutputFormat.JSON else console.print(
        trace_table(trace)
    )


def trace_table(trace: KVTrace) -> Table:
    """One request as rows of fact and value."""
    table = Table("REQUEST", trace.request_id, box=None, header_style="bold")
    table.add_row("served", f"{trace.mode} (class {trace.slo_class})")
    if trace.prefill is not None:
        leg = trace.prefill
        table.add_row(
            "prefill",
            f"{leg.pod} on {leg.node}: {leg.num_prompt_tokens:,} prompt tokens, "
            f"{leg.num_cached_tokens:,} from cache",
        )
    if trace.decode is not None:
        leg = trace.decode
        label = "decode" if trace.prefill is not None else "served by"
        table.add_row(label, f"{leg.pod} on {leg.node}: {leg.num_output_tokens:,} output tokens")
        if leg.kv_bytes:
            busy_rate = leg.kv_bytes / leg.kv_busy_s if leg.kv_busy_s else None
            table.add_row("KV moved", f"{bytes_text(leg.kv_bytes)} over {leg.kv_transport}")
            table.add_row(
                "transfer",
                f"{milliseconds(leg.kv_transfer_s)}, of it after prefill {milliseconds(leg.kv_exposed_s)}",
            )
            table.add_row("link", f"{rate_text(busy_rate)} while busy")
        if leg.recomputed:
            table.add_row("recomputed", leg.recomputed)
    table.add_row("TTFT", milliseconds(trace.ttft_s))
    table.add_row("second token gap", milliseconds(trace.second_token_gap_s))
    table.add_row("TPOT", milliseconds(trace.tpot_s))
    table.add_row("end to end", milliseconds(trace.e2e_s))
    table.add_row("queued", milliseconds(trace.queue_s))
    if trace.num_migrations:
        table.add_row("migrations", str(trace.num_migrations))
    if trace.text is not None:
        table.add_row("text", trace.text)
    return table

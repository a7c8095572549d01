"""Entry point of `phasesplit`: the list of commands and the one place where errors become sentences."""

import sys

import typer

from phasesplit import __version__
from phasesplit.cli import explain, kv, status
from phasesplit.cli.output import errors
from phasesplit.cli.programs import add_programs
from phasesplit.cluster.errors import ClusterError

app = typer.Typer(
    name="phasesplit",
    help="Serve a language model in prefill and decode pools, and see whether that pays.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command(epilog=status.EPILOG)(status.status)
app.command(epilog=explain.EPILOG)(explain.explain)
app.add_typer(kv.app, name="kv")
add_programs(app)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line; a known error ends it with one sentence and status 1."""
    try:
        app()
    except ClusterError as error:
        errors.print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Options that every command shares."""

from typing import Annotated

import typer

from phasesplit.cli.output import OutputFormat

Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace; absent means the context's.", metavar="NAME"),
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", metavar="NAME")]
Output = Annotated[
    OutputFormat, typer.Option("--output", "-o", help="A table for people or JSON for programs.")
]

"""`phasesplit operator|router|worker`: the long-running programs under one name.

Worker and router are other packages; they are imported only when asked for, so that the command
line and the control image never load torch.
"""

import importlib
import sys
from collections.abc import Callable

import typer

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

_MODULES = {
    "operator": "phasesplit.operator.__main__",
    "router": "phasesplit_router.__main__",
    "worker": "phasesplit_worker.__main__",
}


def add_programs(app: typer.Typer) -> None:
    """Register one pass-through command per program."""
    for program, module in _MODULES.items():
        app.command(
            program,
            help=f"Run the {program}; `phasesplit {program} --help` lists its flags.",
            context_settings=_PASS_THROUGH,
        )(_runner(program, module))


def _runner(program: str, module_name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            typer.echo(
                f"error: the {program} needs the module {error.name}; install phasesplit[worker]", err=True
            )
            raise typer.Exit(1) from error
        sys.argv = [f"phasesplit {program}", *context.args]
        module.main()

    return run

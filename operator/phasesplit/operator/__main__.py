"""`phasesplit-operator [lift-gates]`."""

import asyncio
import logging
import os
import sys

import uvloop
from pydantic import ValidationError

from phasesplit.api.command_line import FlagError, FlagParser
from phasesplit.cluster.errors import ClusterError
from phasesplit.operator.lift_gates import lift_gates
from phasesplit.operator.serve import identity, run
from phasesplit.operator.settings import OperatorSettings

logger = logging.getLogger("phasesplit.operator")


def main() -> None:
    """Entry point."""
    parser = FlagParser("phasesplit-operator", "Reconciles DisaggregatedModel objects.")
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "lift-gates"),
        default="run",
        help="run (default): serve; lift-gates: release every gated pod before the operator is removed",
    )
    try:
        command = parser.parse_args().command
    except FlagError as error:
        sys.stderr.write(f"phasesplit-operator: {error}.\n")
        sys.exit(2)
    try:
        settings = OperatorSettings()
    except ValidationError as error:
        for detail in error.errors():
            name = "PHASESPLIT_" + "_".join(str(part) for part in detail["loc"]).upper()
            sys.stderr.write(f"phasesplit-operator: {name} is {detail['input']!r}: {detail['msg']}\n")
        sys.exit(2)
    _configure_logging(settings.log_level)
    # kopf asks the operating system for a user name otherwise, which an arbitrary uid does not have.
    os.environ.setdefault("POD_ID", identity())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if command == "lift-gates":
                released = runner.run(lift_gates(settings))
                logger.info("released %d pods", released)
            else:
                runner.run(run(settings))
    except ClusterError as error:
        sys.stderr.write(f"phasesplit-operator: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _configure_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Two lines per event and object otherwise.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    for chatty in ("kopf.activities", "kopf._core", "aiohttp.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()

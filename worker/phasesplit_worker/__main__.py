"""`phasesplit-worker`: fits engine, transfer and server together and runs them until SIGTERM.

The HTTP server answers at once; the model loads meanwhile.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import uuid

import uvloop
from aiohttp import web

from phasesplit_http.credentials import wait_for_change
from phasesplit_worker.config import WorkerConfig, parse_args
from phasesplit_worker.errors import ConfigError
from phasesplit_worker.server.app import build_app, build_runner
from phasesplit_worker.server.auth import AdminAuth
from phasesplit_worker.server.metrics import WorkerMetrics
from phasesplit_worker.server.ports import Parts
from phasesplit_worker.server.worker import Worker

logger = logging.getLogger("phasesplit_worker")

EXIT_BROKEN = 1
# Open requests get their errors, and whoever asks gets the reason.
_LAST_ANSWERS_S = 2.0
_CLEANUP_S = 5.0


async def serve(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once."""
    engine_id = uuid.uuid4().hex

    def load(metrics: WorkerMetrics) -> Parts:
        # Imported here, on the loading thread: torch and transformers take seconds to import, and
        # the server must answer probes meanwhile.
        from phasesplit_worker.server.composition import load_parts  # noqa: PLC0415

        return load_parts(config, engine_id, metrics)

    worker = Worker(config, AdminAuth.from_file(config.admin_token_file), engine_id, load)
    runner = build_runner(build_app(worker))
    await runner.setup()
    await web.TCPSite(runner, config.host, config.port).start()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    worker.start()
    asking = asyncio.ensure_future(signals.get())
    changing = asyncio.ensure_future(wait_for_change((config.admin_token_file, config.transfer_key_file)))
    breaking = asyncio.ensure_future(worker.wait_broken())
    await asyncio.wait({asking, changing, breaking}, return_when=asyncio.FIRST_COMPLETED)
    if breaking.done() and not asking.done():
        return await _end_broken(worker, runner)
    breaking.cancel()
    if changing.done():
        asking.cancel()
        logger.warning("the admin token or the transfer key has changed; ending, to start again with it")
    changing.cancel()
    logger.info("draining for at most %.0f s", config.drain_s)
    worker.drain()
    second = asyncio.ensure_future(signals.get())
    drained = asyncio.ensure_future(worker.drained(config.drain_s))
    await asyncio.wait({second, drained}, return_when=asyncio.FIRST_COMPLETED)
    is_drained = drained.done() and drained.result()
    second.cancel()
    drained.cancel()
    if not is_drained:
        logger.warning("requests are still running; they end now")
    await worker.stop()
    await runner.cleanup()
    return 0


async def _end_broken(worker: Worker, runner: web.AppRunner) -> int:
    """End soon, to be started again. Nothing is drained: the engine is dead or was never there."""
    logger.error("ending, to start again: %s", worker.message)
    await asyncio.sleep(_LAST_ANSWERS_S)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.cleanup(), _CLEANUP_S)
    return EXIT_BROKEN


def main() -> int:
    """Entry point. Ends the process itself after serving; returns only when it could not start."""
    logging.basicConfig(
        level=os.environ.get("LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = parse_args(sys.argv[1:], os.environ)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(serve(config))
    except (ConfigError, OSError, ValueError) as error:
        print(f"phasesplit-worker: {error}", file=sys.stderr)  # noqa: T201 the command line's answer
        return 2
    logging.shutdown()
    sys.stdout.flush()
    # Everything of ours is closed. Taking torch's modules apart object by object would keep a drained
    # pod terminating for seconds more, and wait for a load that is still under way.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())

"""`phasesplit-router`: reads flags, starts discovery, serves until SIGTERM, drains, ends with 0."""

import asyncio
import logging
import random
import signal
import sys

import uvloop
from aiohttp import web

from phasesplit_http.credentials import wait_for_change
from phasesplit_router.file_watch import FileWatch
from phasesplit_router.router import Router
from phasesplit_router.server import RouterServer
from phasesplit_router.settings import RouterSettings, SettingsError, parse_settings
from phasesplit_router.snapshot import Discovery

logger = logging.getLogger("phasesplit_router")

LEAVING_S = 2.0


def main() -> None:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = parse_settings()
    except SettingsError as error:
        sys.stderr.write(f"phasesplit-router: {error}\n")
        sys.exit(2)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except SettingsError as error:
        sys.stderr.write(f"phasesplit-router: {error}\n")
        sys.exit(2)


async def serve(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    discovery = await _discovery(settings)
    router = Router(settings)
    try:
        await _run(settings, router, discovery, stop)
    finally:
        await router.close()


async def _stop_on_new_token(settings: RouterSettings, stop: asyncio.Event) -> None:
    """A token made anew is taken up by starting again."""
    await wait_for_change((settings.admin_token_file,))
    logger.warning("the admin token has changed; ending, to start again with it")
    stop.set()
    await asyncio.Event().wait()  # like the other background tasks, it never ends by itself


async def _run(settings: RouterSettings, router: Router, discovery: Discovery, stop: asyncio.Event) -> None:
    server = RouterServer(router)
    # Cancellation of handlers is how a client's disconnect reaches the legs at once.
    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise SettingsError(f"--port {settings.port}: cannot listen there ({error.strerror}).") from error
    logger.info(
        "serving %s/%s on %s:%d", settings.namespace, settings.object_name, settings.host, settings.port
    )
    background = [
        asyncio.ensure_future(discovery.run(router.take_snapshot)),
        asyncio.create_task(router.monitor.run_watchdog()),
        asyncio.create_task(_stop_on_new_token(settings, stop)),
    ]
    stopping = asyncio.create_task(stop.wait())
    # Neither discovery nor the watchdog ever ends by itself: if one does, its error ends the process.
    await asyncio.wait([stopping, *background], return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in background if task.done()]
    server.is_leaving = True
    # Clients are still sent here until every node has heard that this pod is leaving.
    await asyncio.sleep(LEAVING_S)
    server.is_draining = True
    await site.stop()
    if runner.server is not None:
        runner.server.pre_shutdown()  # idle connections close now, busy ones after their answer
    await _drain(router, settings.drain_s)
    for task in background:
        task.cancel()
    await asyncio.wait(background, timeout=2)
    await runner.cleanup()
    for task in failed:
        task.result()


async def _discovery(settings: RouterSettings) -> Discovery:
    if settings.routing_file is not None:
        return FileWatch(settings.routing_file)
    # Imported here, so that a router without Kubernetes does not pay for the client's memory.
    from phasesplit_router.kubernetes_watch import KubernetesWatch, WatchError, new_client  # noqa: PLC0415

    try:
        client = await new_client()
    except WatchError as error:
        raise SettingsError(str(error)) from error
    return KubernetesWatch(
        client, namespace=settings.namespace, name=settings.object_name, draw=random.Random()
    )


async def _drain(router: Router, drain_s: float) -> None:
    """Wait for open requests, to a deadline."""
    try:
        async with asyncio.timeout(drain_s):
            await router.is_idle.wait()
    except TimeoutError:
        logger.warning("%d requests were cut off after %.0f s of draining", router.in_flight, drain_s)


if __name__ == "__main__":
    main()

"""The router's flags as one frozen value, checked once."""

from dataclasses import dataclass
from pathlib import Path

from phasesplit.api import names
from phasesplit.api.command_line import FlagError, FlagParser


class SettingsError(Exception):
    """A flag is wrong; the message is one sentence for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What the router was told at start."""

    object_name: str
    namespace: str
    host: str = "0.0.0.0"  # noqa: S104  the router serves the pod network
    port: int = names.ROUTER_API_PORT
    admin_token: str | None = None
    admin_token_file: Path | None = None  # watched: a new token is taken up by a restart
    api_keys_dir: Path | None = None
    routing_file: Path | None = None
    trace_text: bool = False
    drain_s: float = 120.0
    stall_s: float = 30.0
    max_queued: int = 1000


def parse_settings(arguments: list[str] | None = None) -> RouterSettings:
    """Read flags and the files they name. Raises `SettingsError`."""
    parser = FlagParser("phasesplit-router", "OpenAI API in front of two pools.")
    parser.add_argument("--object", required=True, help="name of the DisaggregatedModel")
    parser.add_argument("--namespace", required=True, help="its namespace")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104
    parser.add_argument("--port", type=int, default=names.ROUTER_API_PORT, help="port to listen on")
    parser.add_argument("--admin-token-file", type=Path, help="token of workers and of the router's status")
    parser.add_argument("--api-keys-dir", type=Path, help="directory of files, one client key each")
    parser.add_argument(
        "--routing-file", type=Path, help="table and endpoints from a file, without Kubernetes"
    )
    parser.add_argument("--trace-text", action="store_true", help="keep answers' text in traces")
    parser.add_argument("--drain-s", type=float, default=120.0, help="time for open streams after SIGTERM")
    parser.add_argument(
        "--stall-s", type=float, default=30.0, help="silence after which a stream has stalled"
    )
    parser.add_argument("--max-queued", type=int, default=1000, help="requests that may wait in the router")
    try:
        flags = parser.parse_args(arguments)
    except FlagError as error:
        raise SettingsError(f"{error}.") from error
    if not 0 < flags.port < 65536:
        raise SettingsError(f"--port {flags.port}: it must be between 1 and 65535.")
    for name in ("drain_s", "stall_s", "max_queued"):
        if getattr(flags, name) <= 0:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{flag} {getattr(flags, name)}: it must be greater than 0.")
    if flags.api_keys_dir is not None and not flags.api_keys_dir.is_dir():
        raise SettingsError(
            f"--api-keys-dir {flags.api_keys_dir}: there is no such directory; mount the Secret there."
        )
    return RouterSettings(
        object_name=flags.object,
        namespace=flags.namespace,
        host=flags.host,
        port=flags.port,
        admin_token=_read_token(flags.admin_token_file),
        admin_token_file=flags.admin_token_file,
        api_keys_dir=flags.api_keys_dir,
        routing_file=flags.routing_file,
        trace_text=flags.trace_text,
        drain_s=flags.drain_s,
        stall_s=flags.stall_s,
        max_queued=flags.max_queued,
    )


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"--admin-token-file {path}: it cannot be read ({error.strerror}).") from error
    if not token:
        raise SettingsError(f"--admin-token-file {path}: it is empty; write the admin token into it.")
    return token

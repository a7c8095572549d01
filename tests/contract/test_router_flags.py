"""What the builders render is what the router parses."""

from pathlib import Path

from helpers_resources import build_context
from phasesplit.api.names import ROUTER_API_PORT
from phasesplit.resources.worker_args import API_KEYS_MOUNT, TRANSFER_MOUNT, build_router_args
from phasesplit_router.settings import RouterSettings, parse_settings


def parse(raw_spec: dict[str, object], tmp_path: Path) -> RouterSettings:
    """Parse with the mounts moved to a folder of the test's own."""
    (tmp_path / "transfer").mkdir()
    (tmp_path / "transfer" / "admin-token").write_text("secret")
    (tmp_path / "keys").mkdir()
    moved = {TRANSFER_MOUNT: str(tmp_path / "transfer"), API_KEYS_MOUNT: str(tmp_path / "keys")}
    arguments = build_router_args(build_context(raw_spec))
    for mount, folder in moved.items():
        arguments = [argument.replace(mount, folder) for argument in arguments]
    return parse_settings(arguments)


def test_router_reads_what_the_spec_says(tmp_path: Path) -> None:
    settings = parse({"rollout": {"drainSeconds": 33}}, tmp_path)
    assert (settings.object_name, settings.namespace) == ("chat", "ai")
    assert settings.port == ROUTER_API_PORT
    assert settings.admin_token == "secret"
    assert settings.drain_s == 33
    assert settings.api_keys_dir is None
    assert settings.routing_file is None


def test_api_keys_and_no_drain(tmp_path: Path) -> None:
    spec = {"router": {"apiKeysSecretRef": {"name": "keys"}}, "rollout": {"drainSeconds": 0}}
    settings = parse(spec, tmp_path)
    assert settings.api_keys_dir == tmp_path / "keys"
    assert settings.drain_s == 1

"""Wrong flags: one sentence that names the flag, in every program alike."""

import pytest

from phasesplit.operator.__main__ import main as operator_main
from phasesplit_router.settings import SettingsError, parse_settings
from phasesplit_worker.config import parse_args
from phasesplit_worker.errors import ConfigError

ROUTER = ["--object", "chat", "--namespace", "ai"]
WORKER = ["--model-path", "/m", "--model-name", "m", "--pool", "decode", *ROUTER]
WRONG: dict[str, tuple[list[str], str]] = {
    "unknown": (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    "cut short": (["--por", "80"], "unrecognized arguments: --por 80"),
    "no number": (["--port", "many"], "argument --port: invalid"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_flag_is_named_in_one_sentence(name: str) -> None:
    flags, said = WRONG[name]
    with pytest.raises(SettingsError) as router:
        parse_settings([*ROUTER, *flags])
    with pytest.raises(ConfigError) as worker:
        parse_args([*WORKER, *flags], {})
    for program, error in (("phasesplit-router", router), ("phasesplit-worker", worker)):
        message = str(error.value)
        assert message.startswith(said)
        assert f"see {program} --help" in message
        assert "\n" not in message


@pytest.mark.parametrize("flags", [["--log-level"], ["walk"]])
def test_the_operator_ends_with_status_two_and_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["phasesplit-operator", *flags])
    with pytest.raises(SystemExit) as ended:
        operator_main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert flags[0] in said

"""Pacing: stretches real steps to the duration that a declared profile gives them.

Real tokens, KV and sockets, declared time: several workers on few cores behave like as many devices.
"""

from pathlib import Path

from pydantic import ValidationError

from phasesplit.api.reports import StepProfile
from phasesplit_worker.errors import ConfigError
from phasesplit_worker.scheduling.cost import StepLoad, step_s


def read_pace(path: Path) -> StepProfile:
    """The declared profile; raises ConfigError."""
    try:
        return StepProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--pace file {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(map(str, detail["loc"])) or "the file"
        raise ConfigError(f"--pace file {path} is no step profile: {field}: {detail['msg']}") from error


def remaining_s(profile: StepProfile, load: StepLoad, spent_s: float) -> float:
    """How long to sleep after a step that took `spent_s`; never negative."""
    return max(step_s(profile, load) - spent_s, 0.0)

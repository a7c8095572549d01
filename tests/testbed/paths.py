"""Where the testbed keeps things: the cache that outlives it and the state that does not.

Knows folders and environment variables only; creates nothing.
"""

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Binaries, models and the user's kubeconfig; PHASESPLIT_CACHE overrides it."""
    override = os.environ.get("PHASESPLIT_CACHE")
    return Path(override) if override else Path.home() / ".cache" / "phasesplit"


def state_root() -> Path:
    """Everything one running cluster writes; removed by `down`. PHASESPLIT_TESTBED_ROOT overrides it."""
    override = os.environ.get("PHASESPLIT_TESTBED_ROOT")
    return (
        Path(override).resolve() if override else Path(tempfile.gettempdir()).resolve() / "phasesplit-testbed"
    )


def models_dir() -> Path:
    """Real models, one folder each; containers see this folder as /models."""
    return cache_dir() / "models"


def user_kubeconfig() -> Path:
    """The administrator's kubeconfig, at a place that stays the same from one `up` to the next."""
    return cache_dir() / "testbed" / "kubeconfig"


def repository_root() -> Path:
    """The checkout that this file belongs to."""
    return Path(__file__).resolve().parents[2]

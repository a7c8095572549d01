"""Times as the API server writes them. Pure."""

from datetime import UTC, datetime


def to_rfc3339(time_s: float) -> str:
    """Seconds since 1970 as the API server writes times."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(text: str) -> float | None:
    """The reverse; None for what is no time."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None

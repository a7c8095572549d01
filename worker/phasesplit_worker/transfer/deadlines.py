"""How long a whole pull may take when nobody said so. Pure."""

from collections.abc import Sequence
from statistics import median

from phasesplit.api.reports import LinkSample

# A prefill that is still computing sends heartbeats, so this only bounds a prefill that lives and
# never ends.
PREFILL_ALLOWANCE_S = 60.0
SLOWEST_BYTES_PER_S = 1_250_000.0  # 10 Mbit/s, when nothing was measured yet
SLACK = 4.0  # times the time that the link needs by itself


def choose_deadline_s(num_bytes: int, samples: Sequence[LinkSample]) -> float:
    """Seconds for a pull of `num_bytes`, generous for the slowest link seen."""
    speeds = [sample.bytes_per_s for sample in samples]
    bytes_per_s = min(median(speeds), 10 * min(speeds)) if speeds else SLOWEST_BYTES_PER_S
    return PREFILL_ALLOWANCE_S + SLACK * num_bytes / max(bytes_per_s, SLOWEST_BYTES_PER_S)

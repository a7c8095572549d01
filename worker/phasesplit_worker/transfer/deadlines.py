"""How long the transfer itself may take when nobody said so. Pure.

Waiting for a prefill that still computes does not count here: heartbeats show that it lives, and the
whole pull has a bound of its own.
"""

from collections.abc import Sequence

from phasesplit.api.reports import LinkSample

SHORTEST_S = 5.0
SLACK = 3.0  # times the time that the link needs by itself
UNKNOWN_BYTES_PER_S = 12_500_000.0  # 100 Mbit/s, when the link was not measured yet
NUM_RECENT = 3


def choose_deadline_s(num_bytes: int, newest_first: Sequence[LinkSample]) -> float:
    """Seconds for `num_bytes` over a link, judged by the slowest of its newest samples."""
    recent = [sample.bytes_per_s for sample in newest_first[:NUM_RECENT]]
    bytes_per_s = min(recent, default=UNKNOWN_BYTES_PER_S)
    return max(SHORTEST_S, SLACK * num_bytes / bytes_per_s)

"""Recent measurements of links between nodes, from pulls and from probes.

Knows numbers and ages; `now` is passed in. Does not measure anything itself.
"""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

from phasesplit.api.reports import LinkSample

MAX_AGE_S = 600.0
SAMPLES_PER_LINK = 8
MAX_LINKS = 256
# Below this the round trip, not the link, decides the time.
MIN_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class _Entry:
    sample: LinkSample
    taken_s: float


class LinkBook:
    """The newest samples per (from_node, to_node). Thread-safe and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: OrderedDict[tuple[str, str], deque[_Entry]] = OrderedDict()

    def record(self, sample: LinkSample, now_s: float) -> None:
        """Keep a sample; one that is too small to say anything is dropped."""
        if sample.bytes < MIN_SAMPLE_BYTES or sample.busy_s <= 0:
            return
        key = (sample.from_node, sample.to_node)
        with self._lock:
            self._links.setdefault(key, deque(maxlen=SAMPLES_PER_LINK)).append(_Entry(sample, now_s))
            self._links.move_to_end(key)
            while len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)

    def samples(self, now_s: float) -> list[LinkSample]:
        """All samples of the last `MAX_AGE_S`, newest first per link, with their age."""
        with self._lock:
            for key in [key for key, entries in self._links.items() if _is_old(entries[-1], now_s)]:
                del self._links[key]
            return [
                entry.sample.model_copy(update={"age_s": now_s - entry.taken_s})
                for entries in self._links.values()
                for entry in reversed(entries)
                if not _is_old(entry, now_s)
            ]


def _is_old(entry: _Entry, now_s: float) -> bool:
    return now_s - entry.taken_s > MAX_AGE_S

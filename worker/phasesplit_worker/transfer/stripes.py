"""How the blocks of a pull are dealt to its streams. Pure; both sides use it."""

from collections.abc import Iterator

from phasesplit_worker.transfer.messages import MAX_GROUP_BLOCKS, MAX_STREAMS, Pull

GROUP_BYTES = 4 << 20  # of one frame: few calls, and short of what the caches hold when it is hashed
BYTES_PER_STREAM = 16 << 20  # a further stream is worth its thread from here on


def stripe(pull: Pull) -> Iterator[tuple[int, int]]:
    """Ranges `[start, stop)` of blocks that this pull's stream carries, in order."""
    step = pull.group_blocks * pull.num_streams
    first = pull.first_block + pull.stream * pull.group_blocks
    for start in range(first, pull.num_blocks, step):
        yield start, min(start + pull.group_blocks, pull.num_blocks)


def choose_group_blocks(bytes_per_block: int) -> int:
    """Blocks per frame."""
    return max(1, min(MAX_GROUP_BLOCKS, GROUP_BYTES // bytes_per_block))


def choose_max_streams(num_cores: int) -> int:
    """Most streams of one pull. A stream keeps a core busy at each end and costs some more in all."""
    return max(1, min(MAX_STREAMS, num_cores // 2))


def choose_num_streams(num_bytes: int, max_streams: int) -> int:
    """Streams for a pull of this size."""
    return max(1, min(max_streams, MAX_STREAMS, num_bytes // BYTES_PER_STREAM))

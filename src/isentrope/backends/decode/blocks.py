"""How the keys of the decode backend are divided: blocks that a program reads at a time, heads it takes, and splits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from isentrope.core.caching import bounded_cache
from isentrope.core.compile import count_multiprocessors, find_shared_memory


class Blocks(NamedTuple):
    """What a program reads at a time, for one head size.

    vectors: keys of a block, counted in all its heads; half as many in fp32.
    stages: of the pipeline, one more than the blocks in shared memory; two in fp32.
    warps: of a program.
    programs: that share a multiprocessor.
    """

    vectors: int
    stages: int
    warps: int
    programs: int


# By head size d. A block has vectors · 4d bytes of k and v in 16 bits, and keys · 4d of angles where it rotates. While
# a multiprocessor reads some blocks, others are on their way: more than its share of 4.8 TB/s times a latency of 1 µs,
# 36 KB. `benchmarks/decode_blocks.py` times other shapes.
SERVER_BLOCKS = {32: Blocks(256, 3, 4, 2), 64: Blocks(128, 3, 4, 2), 128: Blocks(64, 2, 4, 3), 256: Blocks(32, 3, 4, 1)}
CONSUMER_BLOCKS = {
    32: Blocks(128, 3, 4, 2), 64: Blocks(64, 3, 4, 2), 128: Blocks(32, 3, 4, 2), 256: Blocks(16, 3, 2, 1),
}  # fmt: skip
MIN_SHARED_MEMORY_BYTES = 200 << 10  # of a program, for SERVER_BLOCKS: Hopper and later have it
MIN_ROWS = 16  # what tensor cores take: query heads per program are padded to it
MIN_KEYS = 16  # of a block, likewise
MIN_KEYS_PER_WARP = 8  # of a block, or warps repeat one another's work
MAX_HEADS = 4  # key heads of a program, which share the angles that it reads
MIN_SPLIT_KEYS = 256  # that are worth a program of their own
MAX_WAVES = 8  # of programs, one after another on a multiprocessor
SPLIT_TOLERANCE = 1.05  # of the shortest time, for fewer splits
MAX_SPLIT_COUNTS = 1024  # kept
MULTIPROCESSORS = 132  # of a GPU that is not there, in the interpreter


def find_device_blocks(x: Tensor) -> tuple[int, dict[int, Blocks]]:
    """Return how many multiprocessors x's device has, and blocks that fit their shared memory."""
    multiprocessors = count_multiprocessors(x.device) if x.is_cuda else MULTIPROCESSORS
    large = find_shared_memory(x) > MIN_SHARED_MEMORY_BYTES
    return multiprocessors, SERVER_BLOCKS if large else CONSUMER_BLOCKS


def fit_angles(blocks: Blocks, together: int) -> int:
    """Return how many vectors a block has whose keys are rotated, so that as many programs fit as are planned.

    With one key head in a program there are as many keys as vectors, and their angles take as much room as k and v.
    """
    enough = blocks.vectors // 2 >= MIN_KEYS_PER_WARP * blocks.warps
    return blocks.vectors // 2 if together == 1 and blocks.programs > 1 and enough else blocks.vectors


def divide_block(blocks: Blocks, vectors: int, together: int) -> tuple[int, int]:
    """Return how many keys a block has, a power of two, and how many programs share a multiprocessor.

    Three heads leave a quarter of the vectors unused, whose room another program takes.
    """
    keys = 1 << (vectors // together).bit_length() - 1
    return keys, blocks.programs + (blocks.programs > 1 and 4 * keys * together <= 3 * vectors)


def share_heads(kv_heads: int, groups: int, most: int) -> int:
    """Return how many key heads a program takes, at most `most`, so that their query heads fit the padded rows."""
    most = max(1, min(most, MAX_HEADS, MIN_ROWS // groups))
    return next(n for n in range(most, 0, -1) if kv_heads % n == 0)


@bounded_cache(MAX_SPLIT_COUNTS)
def count_splits(rows: int, most: int, resident: int) -> int:
    """Return into how many parts, at most, to divide the keys of each row: few that leave no multiprocessor idle.

    Args:
        rows: programs without splits.
        most: parts that are worth a program.
        resident: programs that run at a time.
    """
    rows = max(1, rows)
    counts = range(1, max(1, min(most, MAX_WAVES * resident // rows)) + 1)
    times = [-(-rows * count // resident) / count for count in counts]  # the last wave may not be full
    return next(count for count, time in zip(counts, times, strict=True) if time <= SPLIT_TOLERANCE * min(times))

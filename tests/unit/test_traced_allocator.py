"""The replayed caching allocator against sequences worked out by hand."""

from tests.traced_step.allocator import reserved

MIB = 2**20
PAGE = 20 * MIB


def test_grows_in_pages_and_uses_the_smallest_block_that_fits():
    take = [(0, 8 * MIB, "main"), (1, 4 * MIB, "main"), (2, 6 * MIB, "main")]  # 18 of 20 MiB
    assert reserved(take) == PAGE
    free = [(0, 0, "main"), (2, 0, "main")]  # holes of 8 MiB, and of 6 + the 2 left at the end
    assert reserved([*take, *free, (3, 8 * MIB, "main"), (4, 8 * MIB, "main")]) == PAGE
    # 6 MiB go into the hole at the front only if they don't fit elsewhere better: both are 8, the
    # first is taken.
    assert reserved([*take, *free, (3, 6 * MIB, "main"), (4, 8 * MIB, "main")]) == PAGE


def test_two_holes_are_not_their_sum():
    take = [(i, 5 * MIB, "main") for i in range(4)]
    apart = [*take, (0, 0, "main"), (2, 0, "main"), (4, 10 * MIB, "main")]
    assert reserved(apart) == 2 * PAGE
    together = [*take, (0, 0, "main"), (1, 0, "main"), (4, 10 * MIB, "main")]
    assert reserved(together) == PAGE


def test_a_free_block_at_the_end_is_part_of_what_grows():
    # 15 MiB, of which the last 5 are free with the 5 behind them: 25 more need 15, one page.
    events = [(0, 10 * MIB, "main"), (1, 5 * MIB, "main"), (1, 0, "main"), (2, 25 * MIB, "main")]
    assert reserved(events) == 2 * PAGE


def test_streams_and_small_blocks_have_pools_of_their_own():
    events = [(0, 8 * MIB, "main"), (0, 0, "main"), (1, 8 * MIB, "gather"), (2, 100, "main")]
    assert reserved(events) == 2 * PAGE + 2 * MIB


def test_blocks_are_rounded_up():
    # 2 MiB hold 4096 blocks of 512 bytes, whatever less was asked for.
    events = [(i, 1, "main") for i in range(4097)]
    assert reserved(events[:4096]) == 2 * MIB
    assert reserved(events) == 4 * MIB

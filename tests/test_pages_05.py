"""What helps when a model does not fit."""

import memory_tables


def test_a_cure_that_does_not_help_is_not_recommended() -> None:
    cures = {memory_tables.SHARDED: 90, memory_tables.RECOMPUTED: 50, memory_tables.PARTS: 40}
    assert memory_tables.advice(100, cures) == "split the batch, recompute"
    assert memory_tables.advice(100, cures | {memory_tables.RECOMPUTED: 100}) == "split the batch"
    assert memory_tables.advice(100, dict.fromkeys(cures, 99)) == memory_tables.NO_CURE
    assert memory_tables.advice(100, cures | {memory_tables.PARTS: None}) == "recompute"

"""What a GPU waits for, from the spans of a time line, and what the report makes of it."""

import pytest

from nullgpu import clocked, timeline
from nullgpu.interface import Span, Work


def span(start: float, end: float, kind: int = Work.KERNEL, stream: int = 1, cause: int = -1) -> Span:
    return Span(start, end, cause, stream, kind, "it")


def test_idle_times_have_their_causes() -> None:
    spans = [
        span(0, 1),
        span(3, 4),  # the loop waited for a batch from 1 to 2.5, and the host needed the rest
        span(3.5, 6, Work.NETWORK, stream=2),
        span(6, 7, cause=2),  # waits for the collective from 4 to 6
    ]
    busy, waits = timeline.idle(spans, [(1, 2.5)], 0, 8)
    assert busy == 3
    assert waits == {timeline.DATA: 1.5, timeline.HOST: 1.5, timeline.COMMUNICATION: 2}
    spans[2:] = [
        for_rank(3, 3.5, 5.5, stream=2),
        span(5.5, 6, Work.NETWORK, stream=2),
        span(6, 7, cause=3),
    ]
    _, waits = timeline.idle(spans, [(1, 2.5)], 0, 8)
    assert waits == {timeline.DATA: 1.5, timeline.HOST: 1.5, timeline.COMMUNICATION: 0.5, "rank 3": 1.5}


def test_a_copy_before_a_kernel_waits_for_the_collective() -> None:
    copy = span(4, 4.5, Work.TRANSFER, cause=1)
    _, waits = timeline.idle([span(0, 1), span(1, 4, Work.NETWORK, stream=2), copy, span(4.5, 5)], [], 0, 5)
    assert waits == {timeline.COPIES: 0.5, timeline.COMMUNICATION: 3, timeline.DATA: 0, timeline.HOST: 0}


def test_a_gpu_that_computes_for_another_stream_is_busy() -> None:
    spans = [span(0, 2), span(1, 3, stream=2), span(2, 4, Work.GIVES_WAY), span(4, 5)]
    busy, waits = timeline.idle(spans, [], 0, 5)
    assert busy == 5 and sum(waits.values()) == 0
    assert sum(timeline.longest(spans, 0, 5).values()) == 5, "no kernel counts twice"


def test_a_collective_for_which_nothing_waits_is_no_cause() -> None:
    first, second = span(1, 2, Work.NETWORK, stream=2), span(2, 4, Work.NETWORK, stream=2)
    _, waits = timeline.idle([span(0, 1), first, second, span(4, 5, cause=1)], [], 0, 5)
    assert waits == {timeline.COMMUNICATION: 1, timeline.HOST: 2, timeline.DATA: 0}, "the host launched it late"


def for_rank(rank: int, start: float, end: float, stream: int = 1) -> Span:
    return Span(start, end, -1, stream, Work.WAITS_FOR_RANK, f"waits for rank {rank}")


def test_a_collective_in_the_stream_that_computes_is_no_wait_for_the_host() -> None:
    collective, copy = span(2, 3, Work.NETWORK), span(3, 3.5, Work.TRANSFER)
    spans = [span(0, 1), for_rank(1, 1.25, 2), collective, copy, span(4, 5)]
    busy, waits = timeline.idle(spans, [], 0, 5)
    assert busy == 2
    expected = {"rank 1": 0.75, timeline.COMMUNICATION: 1, timeline.COPIES: 0.5, timeline.HOST: 0.75, timeline.DATA: 0}
    assert waits == expected


def test_updates_whose_kernels_were_not_noted_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [span(number, number + 1) for number in range(10)]
    found = {"updates": [1.0, 2.0, 3.0, 8.0, 20.0, 30.0], "loading": [], "observed": 0}
    monkeypatch.setattr(timeline, "MOST_SPANS", 10)
    it = timeline.summary(found, spans, skip=0)
    assert it and (it.updates, it.busy) == (3, 1)


def test_a_rank_is_called_slower_only_if_it_waits_less_itself() -> None:
    waits = {"rank 1": 0.4, timeline.HOST: 0.1}
    it = timeline.Summary(10, 0.1, 0.5, waits)
    others = {1: timeline.Summary(10, 0.1, 0.9, {timeline.HOST: 0.1})}
    assert "rank 1 is slower" in clocked.advice(it, others)
    others = {1: timeline.Summary(10, 0.1, 0.5, {"rank 0": 0.3, timeline.DATA: 0.2})}
    assert "in turn" in clocked.advice(it, others)

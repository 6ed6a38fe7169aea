"""Captures and replays of CUDA graphs: other modules are told of them."""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Told = Callable[[torch.cuda.CUDAGraph], None]


@dataclass(frozen=True)
class Follower:
    """Functions that are called with the graph: when its capture has begun, when it ends, and after each replay."""

    captures: Told
    captured: Told
    replayed: Told


followers: list[Follower] = []


def follow(captures: Told, captured: Told, replayed: Told) -> None:
    """Call these functions for each graph of this process from now on."""
    if not followers:
        install()
    followers.append(Follower(captures, captured, replayed))


def install() -> None:
    """Replace the methods of PyTorch's graphs."""
    graph = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def capture_begin(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for follower in followers:
            follower.captures(self)

    def capture_end(self: torch.cuda.CUDAGraph) -> None:
        for follower in followers:
            follower.captured(self)
        end(self)

    def replay_and_tell(self: torch.cuda.CUDAGraph) -> None:
        replay(self)
        for follower in followers:
            follower.replayed(self)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay_and_tell

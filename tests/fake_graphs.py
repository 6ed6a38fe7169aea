"""Stand-ins for CUDA streams and graphs, so that what records and replays a training step runs without a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch


def fake_graphs(patch: pytest.MonkeyPatch, graph: Callable, record: Callable = nullcontext) -> None:
    """Let ``graph`` make what is replayed, and ``record`` the context in which the step is recorded."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, stand_in in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": graph,
        "graph": lambda graph, stream, capture_error_mode: record(),
    }.items():
        patch.setattr(torch.cuda, name, stand_in)

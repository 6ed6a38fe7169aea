"""Fixtures of pytest: a test that a training script has no silent faults, and tests that run on two ranks.

def test_training(rankdoctor):
    rankdoctor("train.py --epochs 2")

def test_sum(on_ranks):
    assert on_ranks(sum_of_ranks) == [1.0, 1.0]      # a function of a module, called on each of two ranks
"""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def rankdoctor() -> Callable[..., str]:
    """Run a training script under the doctor; the test fails if it finds a fault, or if nothing can be said.

    Called with the command line of the script, and with options of the doctor as keywords: ``rankdoctor("train.py
    --epochs 2", nproc=4, fail_on="note", thorough=True)``. Returns the report.
    """

    def check(command: str, **options: object) -> str:
        words = []
        for name, value in options.items():
            words += [f"--{name}"] if value is True else [f"--{name}={value}"]
        started = [sys.executable, "-m", "rankdoctor", *words, *shlex.split(command)]
        done = subprocess.run(started, capture_output=True, text=True)
        if done.returncode:
            pytest.fail(f"{done.stdout}{done.stderr}", pytrace=False)
        return done.stdout

    return check


def _join_and_call(rank: int, function: Callable, arguments: tuple, ranks: int, file: str, results: Any) -> None:  # noqa: ANN401
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    results.put((rank, function(*arguments)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list]:
    """Call a function on several ranks, which have joined with gloo; return what it has returned on each of them.

    The function has to be one that another process can import: defined in a module, outside of other functions.
    """

    def call(function: Callable, *arguments: object, ranks: int = 2) -> list:
        import torch.multiprocessing as mp

        results = mp.get_context("spawn").SimpleQueue()
        file = tmp_path / f"rendezvous{len(list(tmp_path.iterdir()))}"
        mp.spawn(_join_and_call, (function, arguments, ranks, str(file), results), nprocs=ranks)
        found = dict(results.get() for _ in range(ranks))
        return [found[rank] for rank in range(ranks)]

    return call

"""Run a script as one or several ranks, and return what they did: their notes, and the results of the run."""

import faulthandler
import json
import math
import multiprocessing
import os
import re
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from clinic import coded
from clinic.notes import Rank, take_notes
from lab.launching import free_port, reason
from workshop import models

models.MODELS["mnist_cnn"] = coded.SmallReader

TIMEOUT = 25.0
"""seconds that a script is given on an idle machine; with the little data here it needs two or three"""
CPU_SECONDS = 20
"""of computing that a rank is given: an endless loop is found by these, however busy the machine is"""


def slowness() -> float:
    """Return how many times longer than usual to wait: the number of processes that compete for each CPU, up to 6."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 6.0)


class Fault(Exception):
    """What is still seen to be wrong, for the learner to read; it never says how to fix it."""


@dataclass
class Observed:
    """What a run did."""

    ranks: list[Rank]
    summary: dict[str, Any]
    """summary.json, empty if there is none"""
    run_dir: Path

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The results of each epoch, at least one.

        Raises:
            Fault: there are none.
        """
        if not self.summary.get("epochs"):
            raise Fault("there are no results of an epoch in the summary.json of the run")
        return self.summary["epochs"]

    def validated(self) -> tuple[set[int], float, int]:
        """Return which samples were validated on, their true mean loss, and how many the model got right.

        Each sample counts once, however often it was shown. For a run with ``keep=True``.
        """
        scores: dict[int, torch.Tensor] = {}
        for call in (call for rank in self.ranks for call in rank.shown if not call.training):
            assert call.outputs is not None, "validated() needs keep=True"
            scores |= dict(zip(call.samples, call.outputs.double(), strict=True))
        if not scores:
            return set(), math.nan, 0
        outputs, targets = torch.stack(list(scores.values())), coded.label_of(torch.tensor(list(scores)))
        right = (outputs.argmax(1) == targets).sum()
        return set(scores), nn.functional.cross_entropy(outputs, targets).item(), int(right)


@dataclass
class Script:
    """The learner's file, and a folder to run it in."""

    path: Path
    folder: Path

    def run(
        self,
        *flags: object,
        ranks: int = 1,
        local_ranks: Sequence[int] | None = None,
        train: int = 320,
        val: int = 64,
        data_dir: Path | None = None,
        run_dir: Path | None = None,
        keep: bool = False,
        notes: bool = True,
        stop_after: int | None = None,
        watch: Callable[[Path], Callable[[], Any]] | None = None,
        timeout: float | None = None,
        fail: bool = True,
    ) -> Observed:
        """Run the script and return what it did.

        Args:
            flags: of the script; data and run folder are set here, and there are no workers unless flags say so.
            ranks: how many.
            local_ranks: of each rank; by default they are all on one node.
            train: number of coded digits to train on.
            val: number of coded digits to validate on.
            data_dir: other data to use.
            run_dir: where an earlier run was, to be resumed.
            keep: note what the model is shown and what it returns too.
            notes: False: note nothing but the results; for a script that compiles its model, which hooks would disturb.
            stop_after: signal the script to stop, as Slurm does, after this number of updates.
            watch: called in each rank before the script, with its path; what it returns is called after the script,
                and what that returns is `Rank.extra`.
            timeout: seconds after which the ranks are ended; by default `TIMEOUT`, and more on a busy machine.
            fail: raise `Fault` if a rank does not end by itself with status 0.
        """
        if data_dir is None:
            data_dir = self.folder / f"data_{train}_{val}"
            if not data_dir.exists():
                coded.write(data_dir, train, val)
        timeout = timeout or TIMEOUT * slowness()
        run_dir = run_dir or Path(tempfile.mkdtemp(dir=self.folder, prefix="run_"))
        noted = Path(tempfile.mkdtemp(dir=self.folder, prefix="notes_"))
        words = [str(word) for word in ("--num_workers", 0, *flags, "--data_dir", data_dir, "--run_dir", run_dir)]
        environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        fork = multiprocessing.get_context("fork")
        processes = []
        local_ranks = range(ranks) if local_ranks is None else local_ranks
        for rank in range(ranks):
            mine = environment | _variables_of_torchrun(rank, local_ranks) if ranks > 1 else {}
            begin = partial(take_notes, keep=keep, stop_after=stop_after) if notes else None
            arguments = (self.path, words, mine, noted / f"{rank}", begin, watch, timeout)
            processes.append(fork.Process(target=_be_a_rank, args=arguments))
            processes[-1].start()
        found, end = [], time.monotonic() + timeout + 10
        for rank, process in enumerate(processes):
            while process.exitcode is None and time.monotonic() < end:  # join would also wait for what it left behind
                time.sleep(0.02)
            process.kill()
            while process.exitcode is None:
                time.sleep(0.02)
            found.append(_read(noted / f"{rank}", self.path, process.exitcode))
        if fail:
            _raise_if_failed(found, timeout)
            if notes and not any(rank.updates for rank in found):
                raise Fault("the script ended without an update of the weights")
        summary = run_dir / "summary.json"
        return Observed(found, json.loads(summary.read_text()) if summary.exists() else {}, run_dir)


def _variables_of_torchrun(rank: int, local_ranks: Sequence[int]) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank, besides WORLD_SIZE and the address of rank 0."""
    nodes = [list(local_ranks[: other + 1]).count(0) - 1 for other in range(len(local_ranks))]
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_ranks[rank],
        "LOCAL_WORLD_SIZE": nodes.count(nodes[rank]),
        "GROUP_RANK": nodes[rank],
        "GROUP_WORLD_SIZE": nodes[-1] + 1,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": len(local_ranks),
    }
    return {name: str(value) for name, value in values.items()}


def percent(share: float) -> str:
    """Return a share as a reader expects it: "80 %", "0.02 %", "less than 0.001 %"."""
    if share < 1e-5:
        return "less than 0.001 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def without_dropout(_: Path) -> Callable[[], None]:
    """For ``watch``: gradients then follow from the samples and the weights alone."""
    nn.Dropout.forward = lambda _, inputs: inputs
    return lambda: None


def _raise_if_failed(ranks: list[Rank], timeout: float) -> None:
    if stuck := [f"rank {number} was in {rank.stuck}" for number, rank in enumerate(ranks) if rank.stuck]:
        where = ", ".join(stuck) if len(ranks) > 1 else stuck[0].replace("rank 0", "it")
        raise Fault(f"the script did not end within {timeout:.0f} s; by then, {where}")
    failed = [rank for rank in ranks if rank.status]
    crashes = (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL)  # others only lost it
    failed.sort(key=lambda rank: (rank.status not in crashes, "Traceback" not in rank.output, not rank.output))
    for rank in failed:
        if rank.status == -signal.SIGXCPU:
            raise Fault(f"the script computed for {CPU_SECONDS} s without coming to its end: is there an endless loop?")
        if rank.status is not None and rank.status < 0:
            raise Fault(f"the script was killed by {signal.Signals(-rank.status).name}")
        raise Fault(f"the script ended with: {reason(rank.output) or f'exit status {rank.status}'}")
    if not all(rank.complete for rank in ranks):
        raise Fault("the script left Python before its end, with exit status 0; does it call os._exit?")


def _be_a_rank(
    script: Path,
    words: list[str],
    environment: dict[str, str],
    notes: Path,
    begin: Callable[[Rank, Path], Callable[[], None]] | None,
    watch: Callable[[Path], Callable[[], Any]] | None,
    timeout: float,
) -> None:
    """Run the script as ``python SCRIPT WORDS`` would, in this process, and leave a `Rank` in ``notes``."""
    with notes.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stuck = notes.with_suffix(".stuck").open("w")
    faulthandler.dump_traceback_later(timeout, exit=True, file=stuck)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    torch.set_num_threads(1)  # a fork loses torch's threads; autograd's own, made later, would replace them in a race
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv = [str(script), *words]
    sys.path[0] = str(script.parent)
    rank = Rank()
    status: object = 0
    try:
        finish = begin(rank, script) if begin else None
        more = watch(script) if watch else None
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        status = stop.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)  # as Python does
    except BaseException:
        traceback.print_exc()
        status = 1
    if status == 0:
        if finish:
            finish()
        rank.extra = more() if more else None
    rank.status = status if isinstance(status, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    torch.save(rank, notes.with_suffix(".pt"))
    faulthandler.cancel_dump_traceback_later()
    for child in psutil.Process().children():  # loader workers that the script has kept
        child.kill()
    os._exit(rank.status)


def _read(notes: Path, script: Path, exitcode: int | None) -> Rank:
    """Return what a rank left; if it was ended before it could, at least how and where."""
    log, stuck, saved = (notes.with_suffix(suffix) for suffix in (".log", ".stuck", ".pt"))
    try:
        rank = torch.load(saved, weights_only=False)  # which this module wrote
    except (OSError, RuntimeError, EOFError):
        rank = Rank(status=exitcode, complete=False)
        frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', stuck.read_text() if stuck.exists() else "")
        if frames:
            mine = [f"line {line} ({name})" for path, line, name in frames if Path(path).name == script.name]
            rank.stuck = mine[0] if mine else f"{frames[0][2]} of {Path(frames[0][0]).name}"
    rank.output = log.read_text(errors="replace") if log.exists() else ""
    return rank

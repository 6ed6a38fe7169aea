"""Run a script as one or several ranks on this machine, and return what they did."""

import builtins
import faulthandler
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F

from clinic import coded
from clinic.catalogue import Exercise
from clinic.observe import Rank, Stop, take_notes
from workshop import models

models.MODELS["mnist_cnn"] = coded.SmallReader

WAITING = 10.0
"""seconds without CPU time after which the ranks count as hanging"""
CPU_SECONDS = 60
"""CPU time of a rank after which it counts as an endless loop; a run needs a few"""


class Fault(Exception):
    """A remaining fault, in words for the learner, without its fix."""


@dataclass
class Observed:
    """What a run did."""

    ranks: list[Rank]
    run_dir: Path

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The results of each epoch in summary.json, at least one.

        Raises:
            Fault: there are none.
        """
        file = self.run_dir / "summary.json"
        found = json.loads(file.read_text()).get("epochs") if file.exists() else None
        if not found:
            raise Fault("there are no results of an epoch in the summary.json of the run")
        return found

    def wrong_validation(self, val: int, rel_tol: float = 1e-5) -> str | None:
        """Return what is wrong with the last results of the validation; None if nothing. For a run with ``keep=True``.

        Loss and accuracy must be those of all ``val`` samples, each counted once, however often it was shown.
        """
        outputs: dict[int, torch.Tensor] = {}
        for call in (call for rank in self.ranks for call in rank.shown if not call.training):
            assert call.outputs is not None, "this needs keep=True"
            outputs |= dict(zip(call.samples, call.outputs.double(), strict=True))
        if len(outputs) < val:
            return f"{val - len(outputs)} of {val} validation samples were seen by no rank"
        scores, targets = torch.stack(list(outputs.values())), coded.label_of(torch.tensor(list(outputs)))
        right, loss = int((scores.argmax(1) == targets).sum()), F.cross_entropy(scores, targets).item()
        reported = self.epochs[-1]
        if abs((count := reported["val_accuracy"] * val) - right) > 1e-2:
            return f"the model got {right} of {val} right, but the reported accuracy means {count:.3f}"
        if not math.isclose(reported["val_loss"], loss, rel_tol=rel_tol):
            return f"the mean loss of {val} samples is {loss:.5f}, but {reported['val_loss']:.5f} is reported"
        return None


@dataclass
class Script:
    """The learner's file, and a folder to run it in."""

    path: Path
    folder: Path
    exercise: Exercise

    def as_started(self) -> "Script":
        """Return the script as ``start`` wrote it, which is right in some respect."""
        path = self.folder / self.exercise.file.name
        path.write_text(self.exercise.faulty())
        return Script(path, self.folder, self.exercise)

    def run(
        self,
        *flags: object,
        ranks: int = 1,
        local_ranks: Sequence[int] | None = None,
        launcher: str = "torchrun",
        train: int = 320,
        val: int = 64,
        data_dir: Path | None = None,
        run_dir: Path | None = None,
        notes: bool = True,
        watch: Callable[[Path], Callable[[], Any]] | None = None,
        fail: bool = True,
        **what: Any,  # noqa: ANN401
    ) -> Observed:
        """Run the script and return what it did.

        Args:
            flags: of the script; data and run folder are set here, and there are no workers unless flags say so.
            ranks: how many; a single one is started as a plain process, without a launcher.
            local_ranks: of each rank; by default they are all on one node.
            launcher: whose variables have the rank of a process, "torchrun" or "srun".
            train: number of samples to train on: coded digits, or sequences of a text.
            val: number of samples to validate on.
            data_dir: other data to use.
            run_dir: where an earlier run was, to be resumed.
            notes: False: note nothing; for a script that compiles its model, which hooks would disturb.
            watch: called in each rank before the script, with its path; what it returns is called after the script,
                and what that returns is `Rank.extra`.
            fail: raise `Fault` if a rank does not end by itself with status 0.
            what: see `clinic.observe.take_notes`.
        """
        if data_dir is None:
            data_dir = self.folder / f"data_{train}_{val}"
            if not data_dir.exists():
                coded.write(data_dir, train, val)
        run_dir = run_dir or Path(tempfile.mkdtemp(dir=self.folder, prefix="run_"))
        out = Path(tempfile.mkdtemp(dir=self.folder, prefix="notes_"))
        words = [str(word) for word in ("--num_workers", 0, *flags, "--data_dir", data_dir, "--run_dir", run_dir)]
        local_ranks = range(ranks) if local_ranks is None else local_ranks
        environments = _environments(launcher, local_ranks) if ranks > 1 else [{}]

        def be_rank(number: int) -> None:
            rank = Rank()
            begin = [lambda: take_notes(rank, **what)] if notes else []
            begin += [lambda: watch(self.path)] if watch else []
            _be_rank(rank, self.path, words, environments[number], out / str(number), begin)

        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=be_rank, args=(number,)) for number in range(ranks)]
        for process in processes:
            process.start()
        _wait(processes)
        found = [_read(out / str(number), self.path, process.exitcode) for number, process in enumerate(processes)]
        if fail:
            try:
                raise_if_failed(found)
            except Fault as fault:
                raise Fault(self._explained(fault, found, flags, ranks, data_dir)) from None
            if notes and not any(rank.updates for rank in found):
                raise Fault("the script ended without an update of the weights")
        return Observed(found, run_dir)

    def _explained(
        self, fault: Fault, found: Sequence[Rank], flags: Sequence[object], ranks: int, data_dir: Path
    ) -> str:
        """Return a fault with the line of the script, the command, and the part that the workers have in it."""
        words = [str(flag) for flag in flags if str(flag) != str(data_dir)]
        launcher = "python" if ranks == 1 else f"torchrun --nproc-per-node={ranks}"
        text = str(fault)
        if line := _line_of(next((rank.output for rank in found if rank.status and rank.output), ""), self.path):
            text += f"; in {self.path.name}, {line}"
        text += f"; the command was: {' '.join([launcher, self.path.name, *words])}"
        workers = [word for flag, word in itertools.pairwise(words) if flag == "--num_workers"]
        if workers and workers[-1] != "0" and any("DataLoader worker" in rank.output for rank in found):
            try:
                self.run(*flags, "--num_workers", 0, ranks=ranks, data_dir=data_dir, notes=False)
            except Fault:
                return text
            text += (
                f". With --num_workers 0 the same command runs to its end: the error comes from {workers[-1]} worker "
                "processes that use one object at the same time, such as a file opened before they were started"
            )
        return text


def percent(share: float) -> str:
    """Return a share as a reader expects it: "80 %", "0.02 %", "less than 0.001 %"."""
    if share < 1e-5:
        return "less than 0.001 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``expected``."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def raise_if_failed(ranks: Sequence[Rank]) -> None:
    """Raise `Fault` with the likely cause if a rank failed, or was ended because it waited."""
    failed = [(number, rank, rank.status) for number, rank in enumerate(ranks) if rank.status]
    failed.sort(key=lambda one: (not one[1].place, "Traceback" not in one[1].output, not _reason(one[1].output)))
    for number, rank, status in failed:
        if status == -signal.SIGXCPU:
            raise Fault(f"the script computed for {CPU_SECONDS} s without coming to its end: is there an endless loop?")
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        where = f", when rank {number} was {rank.place}" if rank.place else ""
        raise Fault(f"the script ended with: {_reason(rank.output) or how}{where}")
    if any(rank.status is None for rank in ranks):
        places = [f"rank {number} {rank.place or 'at its end'}" for number, rank in enumerate(ranks)]
        who = "the ranks wait for each other: " if len(ranks) > 1 else "the script waits for ever: "
        raise Fault(who + ", ".join(places))


def _environments(launcher: str, local_ranks: Sequence[int]) -> list[dict[str, str]]:
    """Return what the launcher puts into the environment of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = len(local_ranks)
    nodes = [list(local_ranks[: rank + 1]).count(0) - 1 for rank in range(ranks)]
    found = []
    for rank, local_rank in enumerate(local_ranks):
        on_node = nodes.count(nodes[rank])
        if launcher == "torchrun":
            values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": on_node}
            values |= {"GROUP_RANK": nodes[rank], "GROUP_WORLD_SIZE": nodes[-1] + 1}
        else:
            values = {"SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": nodes[rank]}
            values |= {"SLURM_NTASKS": ranks, "SLURM_STEP_NUM_TASKS": ranks, "SLURM_NTASKS_PER_NODE": on_node}
            values |= {"SLURM_NNODES": nodes[-1] + 1, "SLURM_STEP_ID": 0, "SLURM_STEPID": 0, "SLURM_JOB_ID": 1}
        found.append(address | {name: str(value) for name, value in values.items()})
    return found


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Wait until all ranks have ended; end those that compute nothing any more. A busy machine only takes longer."""
    computed, quiet = -1.0, 0.0
    while any(process.exitcode is None for process in processes):
        time.sleep(0.05)
        quiet += 0.05  # not by the clock: if everything is suspended, this process is too
        if abs((now := _cpu_seconds(processes)) - computed) > 0.1:
            computed, quiet = now, 0.0
        # If a rank has failed, those that wait for it are ended sooner, as a launcher does.
        if quiet > (WAITING / 5 if any(process.exitcode for process in processes) else WAITING):
            for end, seconds in ((signal.SIGUSR2, 0.3), (signal.SIGTERM, 1.0), (signal.SIGKILL, 0.0)):
                for process in processes:
                    if process.exitcode is None and process.pid:
                        os.kill(process.pid, end)
                time.sleep(seconds)


def _cpu_seconds(processes: Sequence[BaseProcess]) -> float:
    """Return how long these processes and those that they have started have computed."""
    seconds = 0.0
    for process in processes:
        try:
            family = psutil.Process(process.pid)
            seconds += sum(sum(member.cpu_times()[:2]) for member in (family, *family.children(recursive=True)))
        except psutil.Error:  # it has just ended
            continue
    return seconds


def _be_rank(
    rank: Rank, script: Path, words: list[str], environment: dict[str, str], out: Path, begin: list[Callable]
) -> None:
    """Run the script as ``python SCRIPT WORDS`` would, in this process, and leave its notes in ``out``."""
    with out.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, file=out.with_suffix(".place").open("w"))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    torch.set_num_threads(1)  # a fork loses torch's threads; autograd's own, made later, would replace them in a race
    _be_unlike_the_other_forks(script)
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv = [str(script), *words]
    sys.path[0] = str(script.parent)
    status: object = 0
    finish: list[Callable] = []
    try:
        finish += [start() for start in begin]
        runpy.run_path(str(script), run_name="__main__")
    except Stop:
        pass
    except SystemExit as stop:
        status = stop.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)  # as Python does
    except BaseException:
        traceback.print_exc()
        status = 1
    for end in finish:
        with suppress(Exception) if status else nullcontext():
            rank.extra = end()
    rank.status = status if isinstance(status, int) else 1
    torch.save(rank, out.with_suffix(".new"))
    out.with_suffix(".new").rename(out.with_suffix(".pt"))
    sys.stdout.flush()
    sys.stderr.flush()
    for child in psutil.Process().children():  # loader workers that the script has kept
        child.kill()
    _leave(rank.status)


_leave = os._exit


def _be_unlike_the_other_forks(script: Path) -> None:
    """Give this process what a new process has of its own, and have `os._exit` return to where the notes are saved.

    In a new process, `hash` returns other numbers for texts. Here it does so for the script alone, because dictionaries
    that PyTorch has made before the fork depend on it.
    """
    np.random.seed()
    own_hash, own_pid = builtins.hash, os.getpid()

    def salted(value: object) -> object:
        if isinstance(value, str | bytes):
            return own_pid, value
        return tuple(map(salted, value)) if isinstance(value, tuple) else value

    def hash_(value: object) -> int:
        return own_hash(salted(value) if sys._getframe(1).f_code.co_filename == str(script) else value)

    def leave(status: int) -> None:
        if os.getpid() == own_pid:
            raise SystemExit(status)
        _leave(status)  # a worker

    builtins.hash = hash_
    os._exit = leave  # type: ignore[assignment]


def _read(out: Path, script: Path, exitcode: int | None) -> Rank:
    """Return what a rank left; if it was ended before it could leave anything, at least how and where."""
    saved, log, place = (out.with_suffix(suffix) for suffix in (".pt", ".log", ".place"))
    output = log.read_text(errors="replace") if log.exists() else ""
    if saved.exists():
        rank = torch.load(saved, weights_only=False)  # which this module wrote
    else:
        rank = Rank(status=exitcode)
        waited = place.read_text() if place.exists() else ""
        crashed = output.partition("Fatal Python error")[2]  # torch lets Python say where it crashed
        if frames := re.findall(r'File "(.*)", line (\d+) in (\S+)', waited or crashed):
            mine = [f"in line {line} ({name})" for path, line, name in frames if Path(path).name == script.name]
            rank.place = mine[0] if mine else f"in {frames[0][2]} of {Path(frames[0][0]).name}"
        if waited:
            rank.status = None
    rank.output = output
    return rank


def _line_of(output: str, script: Path) -> str:
    """Return the last line of the script in a traceback, of a loader worker's where there is one; "" without any."""
    traceback_ = output.partition("Original Traceback")[2] or output
    frames = re.findall(rf'File "[^"]*{re.escape(script.name)}", line (\d+), in \S+\n\s+(.*)', traceback_)
    return f"line {frames[-1][0]}: {frames[-1][1].strip()}" if frames else ""


def _reason(output: str) -> str:
    """Return the line of a script's output that says why it failed; with the next one, if it ends with a colon."""
    lines = [line.strip() for line in output.partition("Fatal Python error")[0].splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r"\d\d:\d\d:\d\d  ", line)]  # the log says what went well
    for pattern in (r"error: ", r"[\w.]*(Error|Exception|Interrupt)\b", r"what\(\): "):
        if found := [number for number, line in enumerate(lines) if re.match(pattern, line)]:
            return " ".join(lines[found[-1] : found[-1] + (2 if lines[found[-1]].endswith(":") else 1)])
    return lines[-1] if lines else ""

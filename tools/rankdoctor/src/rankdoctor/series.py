"""Which runs are made: the ordinary one, started in the way that fits, then those under provocations."""

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import report
from .checks import CHECKS, FAULT, NOTE, judge
from .checks.same_validation import differing_results
from .launch import INTERRUPTED, NoNullGPU, Plan, likely_launchers, run
from .runs import Run, read, write_launch
from .settings import AFTER_A_SAVE

NO_LIMIT = 10**9
BRANCHES = 2
"""skip conditions that are tried, each in a separate run"""
"""updates; the time limit ends the run before"""


class Progress:
    """Shows how far a run is, in one line of a terminal."""

    def __init__(self, name: str) -> None:
        self.name, self.last = name, ""

    def __call__(self, state: str) -> None:
        """Show the state, such as "12 s, 30 updates"."""
        if sys.stderr.isatty() and state != self.last:
            self.last = state
            print(f"\r\033[Krankdoctor: {self.name}: {state}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line."""
        if self.last:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_once(plan: Plan, folder: Path) -> Run:
    """Run a script as planned, and return its events."""
    folder.mkdir(exist_ok=True)
    progress = Progress(f"{plan.script.name}{' ' + plan.name if plan.name else ''}")
    try:
        run(plan, folder, progress)
    finally:
        progress.close()
    return read(folder)


def run_all(options: argparse.Namespace, plan: Plan, folder: Path) -> Iterator[Run]:
    """Yield the ordinary run, then those under provocations."""
    plan, usual = usual_run(options, plan, folder / "run0")
    if usual.any("pass", again=True) or any(
        e["type"] == "StopIteration" or "StopIteration" in e["text"] for _, e in report.errors(usual)
    ):  # it counts on len(loader) batches
        plan = replace(plan, settings=plan.settings | {"batches": 0})
        usual = run_again(plan, folder / "run0")
    confirm(plan, usual, folder)
    usual.launch.left_out = left_out(options, usual)
    yield usual
    if not usual.any("update"):
        return
    if end := to_end_of_pass(plan, usual):
        yield run_once(end, folder / "run10")
    yield from run_provocations(list(provocations(options, plan, usual)), folder)
    alone = not options.thorough or not sends_messages(usual)
    if (options.validation or options.thorough) and alone and usual.world > 1 and evaluates(usual):
        yield from validate_on_one_rank(plan, usual, folder)
    if options.resume is not None or (options.thorough and writes_files(usual)):
        yield from stop_and_resume(options, plan, usual, folder / "run9")


def run_provocations(plans: list[Plan], folder: Path) -> Iterator[Run]:
    """Yield the runs under provocations, in their order; they run side by side where there are CPUs enough."""
    folders = [folder / f"run{number}" for number in range(1, len(plans) + 1)]
    if not plans or (together := at_once(plans[0])) == 1:
        yield from map(run_once, plans, folders)
        return
    with ThreadPoolExecutor(together) as pool:
        try:
            yield from list(pool.map(run_once, plans, folders))
        except BaseException:  # also the user's interruption
            INTERRUPTED.set()  # so that the others end their ranks, and the pool ends
            raise


def at_once(plan: Plan) -> int:
    """Return how many runs this machine has CPUs for: each rank, and a worker of its loader, has one."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cpus // (2 * plan.ranks))


CUT_COULD_CAUSE = (
    ("same_order", FAULT),
    ("same_order", NOTE),
    ("results_combined", FAULT),
    ("gradients_used", NOTE),
    ("equal_steps", FAULT),
)
"""checks with a possible false finding in cut passes, and its kind: a script that counts the batches of an epoch begins
its passes too early, and never comes to what it does in the last one, such as filling in for a rank without a batch"""


def confirm(plan: Plan, usual: Run, folder: Path) -> None:
    """Run the script once more for what one run cannot tell; note in the run what is true."""
    cut = plan.settings["batches"] and any(
        e.get("batches", 0) > plan.settings["batches"]
        for rank in usual.ranks
        for kind in ("pass", "pass_end")
        for e in rank.all(kind)
    )
    kinds = {(f.check, f.kind) for f in judge([usual]).findings}
    found = {check for check, _ in kinds}
    doubtful = {check for check, kind in kinds if cut and (check, kind) in CUT_COULD_CAUSE}
    if doubtful:
        whole = replace(plan, name="with whole passes", settings=plan.settings | {"batches": 0, "steps": NO_LIMIT})
        again = judge([run_once(whole, folder / "run7")])
        shutil.rmtree(folder / "run7")
        titles = {check.name: check.title for check in CHECKS}
        usual.launch.refuted = [name for name in sorted(doubtful) if titles[name] in again.fine]
        usual.launch.refuted_by = {name: again.fine[titles[name]] for name in usual.launch.refuted}
        usual.launch.unconfirmed = [name for name in sorted(doubtful) if titles[name] in again.unjudged]
    if "gathered_gradients" in found:
        probe = replace(plan, name="with traced gathers", settings=plan.settings | {"probe_gathers": True})
        traced = run_once(probe, folder / "run7")
        shutil.rmtree(folder / "run7")
        used = [e["at"] for rank in traced.ranks for e in rank.all("gathered_used")]
        usual.launch.used_gathers = sorted(set(used))
        by_functions = any(e.get("in_function") for kind in ("collective", "inner") for e in usual.first.all(kind))
        if not used and not by_functions and traced.any("update"):  # a Function's own backward is not traced
            usual.launch.refuted.append("gathered_gradients")
            usual.launch.refuted_by["gathered_gradients"] = "no gradient came to what all_gather returned"
    write_launch(usual.launch, folder / "run0")


MOST_BATCHES = 400
"""batches of a pass that is run to its end because of its last group"""


def to_end_of_pass(plan: Plan, usual: Run) -> Plan | None:
    """Return a run through a whole pass, if its end is another one than that of a cut pass; None if it is not.

    A script that accumulates gradients comes to a shorter group there, if the batches are no multiple of a group. And
    one whose optimizer has weights that were frozen when DDP was made may unfreeze them before.
    """
    updates = usual.first.all("update")
    if usual.sharded:  # without its exchange, fully_shard keeps what it adds up for itself
        parts = Counter(len(e["backwards"]) for e in updates if e["backwards"]).most_common(1)
    else:
        parts = Counter(e["followed"] for e in updates if e.get("followed")).most_common(1)
    passes = [e for e in usual.first.all("pass") if e["loader"] in usual.training and "batches" in e]
    if not parts or not passes or not plan.settings["batches"]:
        return None
    batches, group = passes[0]["batches"], parts[0][0]
    has_frozen = any(e["frozen"] for e in usual.first.all("ddp")) and any(
        after["parameters"] > len(before["gradients"])
        for before, after in zip(usual.first.all("gradients"), usual.first.all("update"), strict=False)
    )
    if not plan.settings["batches"] < batches <= MOST_BATCHES or (batches % group == 0 and not has_frozen):
        return None
    return replace(
        plan,
        name="to the end of a pass",
        settings=plan.settings | {"batches": 0, "steps": passes[0]["step"] + batches // group + 4},
    )


def usual_run(options: argparse.Namespace, plan: Plan, folder: Path) -> tuple[Plan, Run]:
    """Return the ordinary run, with how it was started: in the first way in which all ranks join and train."""
    usual = run_once(plan, folder)
    if plan.gpus == "standin" and why_null_gpus(usual):
        plan, usual = on_null_gpus(plan, usual, folder)
    in_time = usual.launch.ended != "time"  # otherwise another way of starting it would take as long
    if options.launcher != "auto" or all_train(usual, plan) or not in_time:
        return plan, usual
    first, failed = plan, {(plan.launcher, plan.local_rank_flag)}
    while other := other_launcher(usual, plan, failed):
        failed.add(other)
        plan = replace(plan, launcher=other[0], local_rank_flag=other[1])
        usual = run_again(plan, folder)
        if all_train(usual, plan) or plan.launcher == "single" or usual.launch.ended == "time":
            return plan, usual
    return (plan, usual) if plan == first else (first, run_again(first, folder))  # the first guess is the likeliest


CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def why_null_gpus(usual: Run) -> str:
    """Return what the stand-in may have caused, for which null GPUs are tried; "": nothing."""
    texts = [e["text"] for _, e in report.errors(usual) if report.is_standins_fault(usual, e)]
    signals = [f"a rank ended by signal {-s}" for s in usual.launch.statuses if s is not None and -s in CRASHES]
    return next(iter([*texts, *([] if report.errors(usual) else signals)]), "")


def on_null_gpus(plan: Plan, usual: Run, folder: Path) -> tuple[Plan, Run]:
    """Return the run with PyTorch's own CUDA code if the script gets further with it than with the stand-in."""
    other = replace(plan, gpus="null")
    try:
        again = run_once(other, folder.with_name("run6"))
    except NoNullGPU:  # no compiler, or another system than Linux
        return plan, usual
    if len(again.first.all("update") if again.ranks else ()) > len(usual.first.all("update") if usual.ranks else ()):
        shutil.rmtree(folder)
        folder.with_name("run6").rename(folder)
        again.launch.instead = why_null_gpus(usual)
        return other, again
    shutil.rmtree(folder.with_name("run6"))
    return plan, usual


def run_again(plan: Plan, folder: Path) -> Run:
    """Run a script in the place of an earlier run."""
    shutil.rmtree(folder)
    return run_once(plan, folder)


def all_train(run: Run, plan: Plan) -> bool:
    """Return whether as many ranks as planned have joined and trained."""
    return bool(run.ranks) and run.any("update") and run.world == (1 if plan.launcher == "single" else plan.ranks)


def other_launcher(run: Run, plan: Plan, failed: set[tuple[str, bool]]) -> tuple[str, bool] | None:
    """Return another way of starting a script, with which all ranks may join and train; None if there is none."""
    if run.launch.ended == "spawn" and ("spawn", False) not in failed:
        return "spawn", False
    if any(e["type"] in ("ModuleNotFoundError", "FileNotFoundError") for _, e in report.errors(run)):
        return None  # it lacks something
    for way in likely_launchers(plan.script):
        if way not in failed:
            return way
    return ("single", False) if run.any("update") and ("single", False) not in failed else None


def writes_files(run: Run) -> bool:
    """Return whether the script has written anything that it could go on from."""
    return run.any("save") or run.any("write")


def sends_messages(run: Run) -> bool:
    """Return whether ranks send to each other, as stages of a pipeline do: one rank alone would wait for the others."""
    return run.any("message") or run.any("inner", name="message")


def left_out(options: argparse.Namespace, usual: Run) -> list[str]:
    """Return what --thorough leaves out because it could change nothing, and why."""
    if not options.thorough or not usual.any("update"):
        return []
    found = []
    if not usual.any("loader"):
        found += ["uneven data and other workers (no DataLoader was seen)"]
    if usual.world < 2:
        found += ["what needs several ranks"]
    elif sends_messages(usual):
        found += ["one rank (the ranks send to each other)"]
    if options.resume is None and not writes_files(usual):
        found += ["a stop and a restart (no file was written)"]
    return found


def provocations(options: argparse.Namespace, plan: Plan, usual: Run) -> Iterator[Plan]:
    """Yield the further runs that were asked for."""

    def provoked(provocation: str, name: str, settings: dict[str, Any] | None = None, **fields: Any) -> Plan:  # noqa: ANN401
        settings = plan.settings | (settings or {})
        return replace(plan, provocation=provocation, name=name, settings=settings, **fields)

    several = usual.world > 1
    has_loader = usual.any("loader")
    if options.uneven or (options.thorough and has_loader):
        yield provoked("uneven", "with uneven data", {"uneven": True})
    if (options.two_nodes or options.thorough) and several and plan.nodes == 1 and plan.launcher != "spawn":
        yield provoked("two_nodes", "as on two nodes", ranks=2, nodes=2)
    if (options.nan or options.thorough) and several:
        yield provoked("nan", "with a NaN on rank 1", {"nan_rank": 1})
    if (options.outliers or options.thorough) and several:
        middle = max(2, 2 * len(usual.first.all("update")) // 5)
        yield provoked("outliers", "with outliers on rank 1", {"outlier_rank": 1, "outlier_step": middle})
    if (options.skip or options.thorough) and several:
        for e in usual.first.all("branch")[:BRANCHES]:
            settings = {"branch": e["at"], "branch_body": e["body"], "branch_rank": 1}
            yield provoked("skip", f"with a batch that rank 1 skips at line {e['at'].rpartition(':')[2]}", settings)
    if (options.one_rank or (options.thorough and not sends_messages(usual))) and several:
        yield provoked("one_rank", "on one rank", compared="other_ranks", ranks=1, nodes=1)
    if options.workers or (options.thorough and has_loader):
        has_workers = has_loader and any(e["workers"] for e in usual.first.all("loader"))
        name = "without workers" if has_workers else "with two workers"
        yield provoked("workers", name, {"workers": 0 if has_workers else 2}, compared="other_workers")


def evaluates(run: Run) -> bool:
    """Return whether a model is evaluated, by several ranks or by one."""
    return run.any("forward", train=False, grad=False)


def validate_on_one_rank(plan: Plan, usual: Run, folder: Path) -> Iterator[Run]:
    """Yield runs whose weights do not move: on several ranks, on one, and there with smaller batches if that is needed.

    The passes of their validations are whole. The order is that in which the results are compared.
    """
    seen = {e["loader"] for rank in usual.ranks for e in rank.all("loader")}
    whole = sorted(seen - usual.training)
    frozen = replace(
        plan,
        provocation="frozen",
        name="with weights that do not move",
        settings=plan.settings | {"frozen": True, "whole": whole, "influence": False, "reference": False},
    )
    weights = {"weights": str(folder / "run11" / "weights.pt")}
    alone = replace(frozen, ranks=1, nodes=1, settings=frozen.settings | weights)
    several = run_once(frozen, folder / "run11")
    yield several
    one = run_once(replace(alone, name="validated on one rank", compared="frozen"), folder / "run12")
    yield one
    if differing_results(several, one) and whole:
        settings = alone.settings | {"halved": whole}
        yield run_once(replace(alone, name="with smaller batches", settings=settings), folder / "run13")


def stop_and_resume(options: argparse.Namespace, plan: Plan, usual: Run, folder: Path) -> Iterator[Run]:
    """Yield a run that is stopped after its first checkpoint, and runs that find what the ones before have written.

    The first resumed run is stopped too, if enough of the training is left, and resumed once more: some faults, such as
    an epoch that is counted from the last start, begin there.
    """
    updates = len(usual.first.all("update"))
    saves = {e["step"] for rank in usual.ranks for e in rank.events if e["e"] == "save"}
    first = min((step for step in saves if 0 < step < updates), default=updates // 2)
    after = first + 1
    if after > updates:
        return
    # a script that saves later than the ordinary run has ended: it is stopped when it has saved
    unlimited = {"stop_after": AFTER_A_SAVE, "steps": NO_LIMIT}
    saves_later = options.resume is not None and not saves and usual.launch.ended == "enough"
    # later, so that it goes on in another epoch than it began
    second = max((step for step in saves if first < step <= 0.8 * updates), default=2 * first)
    args = [*plan.args, *shlex.split(options.resume or "")]
    stopping = plan.settings | (unlimited if saves_later else {"stop_after": after})
    if (
        saves and min(saves) >= updates
    ):  # it saves at its end, as a script does that stops itself: nothing else to go on from
        stopping = plan.settings
    plan = replace(plan, provocation="resume")
    resumed = replace(plan, compared="resumed", args=args)
    # all in one folder, because the checkpoints are in it; "run8" and others are copies of the events
    stopped = run_once(replace(plan, name="stopped", settings=stopping), folder)
    yield keep_copy(options, stopped, folder, "run8")
    if saves_later or stopped.launch.ended != "stopped":
        yield run_once(replace(resumed, name="stopped and resumed"), folder)
        return
    once_more = plan.settings | {"stop_after": second - first + 1}
    again = run_once(replace(resumed, name="stopped and resumed", settings=once_more), folder)
    if again.launch.ended != "stopped":
        yield again
    else:
        yield keep_copy(options, again, folder, "run81")
        yield run_once(replace(resumed, name="resumed a second time"), folder)


def keep_copy(options: argparse.Namespace, done: Run, folder: Path, name: str) -> Run:
    """Copy the events of a run if they are to be kept, because the next run needs its folder; return the run."""
    if options.keep:
        shutil.copytree(folder, folder.with_name(name), ignore=shutil.ignore_patterns("files", "removed", "tmp"))
    return done

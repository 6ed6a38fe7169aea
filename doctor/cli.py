"""Run a training script, unchanged, as several ranks on this machine's CPUs, and report its silent faults.

    python -m doctor train.py --epochs 2             as two ranks on one node; no GPU, no change of the script
    python -m doctor --thorough train.py --epochs 2  also as two nodes, with uneven data, stopped and resumed, and more

Every pass of a loader ends after some batches, the last one always among them, so that epochs, validation and
checkpoints come soon. Let the script train for two epochs. What it writes goes into a folder of the doctor's, which is
removed.
Exit status: 0 if no fault was found, 1 if one was, 2 if nothing can be said (wrong arguments, the script failed).
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import formats, report
from .accepted import BaselineError, accept
from .checks import CHECKS, COST, FAULT, NOTE, Diagnosis, judge
from .events import Run, read, write_launch
from .launch import LAUNCHERS, Plan, file_of_module, likely_launchers, run, started_by

NO_LIMIT = 10**9
"""updates; the time limit ends the run before"""
OLDEST_TORCH = (2, 11)
KINDS = (FAULT, NOTE, COST)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments; those after the script are the script's own."""
    it = argparse.ArgumentParser(
        prog="doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m doctor [options] SCRIPT [its arguments]   or   -m MODULE [its arguments]",
    )
    add = it.add_argument
    add("script", metavar="SCRIPT", nargs="?", help="the training script")
    add(
        "args",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="its arguments; {rank} and {node} stand for the number of the rank, and of its node",
    )
    add(
        "-m",
        dest="module",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        help="the name of a module, and its arguments, instead of a script: as for python -m",
    )
    how = it.add_argument_group("how it is run")
    add = how.add_argument
    add("--nproc", type=int, default=2, help="ranks on each node (default: 2)")
    add("--nodes", type=int, default=1, help="nodes that are emulated, each with its own local ranks (default: 1)")
    add(
        "--launcher",
        choices=("auto", *LAUNCHERS),
        default="auto",
        help="how ranks are started: as by torchrun, as by srun, with the variables of both, by the script itself "
        "(spawn), or a single process (default: guessed from the script)",
    )
    add(
        "--cpu", action="store_true", help="let the script see that there is no GPU; default: it sees one for each rank"
    )
    add("--null_gpu", action="store_true", help="run PyTorch's own CUDA code, on GPUs that compute nothing (needs g++)")
    add("--on_gpus", action="store_true", help="run on this machine's GPUs")
    add("--batches", type=int, default=8, help="batches of each pass of a loader (default: 8)")
    add("--full", action="store_true", help="whole passes, and as many updates as the script makes")
    add("--steps", type=int, help="updates after which the run is ended (default: 100; with --full no limit)")
    add("--seconds", type=float, default=180, help="time limit of each run (default: 180)")
    add("--preload", metavar="FILE", help="Python file to run in each process before the script, such as small data")
    add("--no_redirect", action="store_true", help="let the script write where it wants to")
    provoke = it.add_argument_group("provocations: a further run each")
    add = provoke.add_argument
    add("--thorough", action="store_true", help="all of them")
    add("--uneven", action="store_true", help="data sets of sizes that cannot be shared evenly")
    add("--two_nodes", action="store_true", help="two nodes of one rank, so that the local rank is 0 everywhere")
    add(
        "--resume",
        metavar="ARGS",
        nargs="?",
        const="",
        help="stopped after its first checkpoint, then run again; ARGS are "
        "the arguments that make it resume, in one string, if it needs any: --resume='--resume last.pt'",
    )
    add("--nan", action="store_true", help="one input on one rank is not a number")
    add("--one_rank", action="store_true", help="one rank instead of several")
    add("--workers", action="store_true", help="loaders with two workers, or with none if they have some")
    out = it.add_argument_group("report")
    add = out.add_argument
    add("--json", action="store_true", help="the same as --format json")
    add(
        "--format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="the report for people, for programs, as annotations of GitHub's, or as SARIF (default: text)",
    )
    add(
        "--fail-on",
        "--fail_on",
        choices=("fault", "note", "cost"),
        default="fault",
        help="exit with status 1 from this kind of finding on (default: fault)",
    )
    add(
        "--baseline",
        metavar="FILE",
        help="report only what is not in this file; if there is none, it is written with what is found",
    )
    add("--verbose", action="store_true", help="also list what was looked at, and what could not be judged")
    add("--report", metavar="FILE", help="write it to a file too: Markdown, or HTML if the name ends with .html")
    add("--keep", metavar="FOLDER", help="keep the events, the output and the files of the runs in this new folder")
    add("--reread", metavar="FOLDER", help="judge the runs in this folder again, without a script")
    return it


def main(arguments: list[str] | None = None) -> int:
    """Run, judge, report; return the exit status."""
    options = parser().parse_args(arguments)
    see_environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored, as in the background
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all ranks are ended
    with contextlib.ExitStack() as stack:
        try:
            if options.reread:
                runs = [
                    read(folder)
                    for folder in sorted(Path(options.reread).glob("run*"))
                    if (folder / "run.json").is_file()
                ]
                refuse(not runs, f"{options.reread} has no runs in it: name a folder that --keep made")
            else:
                plan = make_plan(options)
                folder = working_folder(options, stack)
                runs = list(run_all(options, plan, folder))
            return print_report(options, runs)
        except KeyboardInterrupt:
            print("\ndoctor: interrupted; all ranks are ended", file=sys.stderr)
            return 130
        except OSError as error:
            refuse(True, str(error))
            raise


def see_environment() -> None:
    """End with one line if no rank can run here; warn if PyTorch is older than what the doctor was tested with."""
    refuse(os.name == "nt", "Windows lacks what the doctor needs; run it in WSL 2, which is a Linux inside Windows")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        refuse(True, f"{sys.executable} has no PyTorch: start the doctor with the Python with which your script trains")
        raise
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < OLDEST_TORCH:
        print(f"doctor: PyTorch {torch} is older than 2.11; with that the doctor was not tested", file=sys.stderr)


def refuse(wrong: bool, message: str) -> None:
    """End with exit status 2 and one line if something is wrong with the arguments."""
    if wrong:
        print(f"doctor: error: {message}", file=sys.stderr)
        sys.exit(2)


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the ordinary run that the arguments ask for."""
    equals = "; write --resume=ARGS with an equals sign" if options.resume else ""
    module, args = "", options.args
    if options.module is not None:
        refuse(not options.module, "-m needs the name of a module")
        module, *args = options.module
        found = file_of_module(module)
        refuse(found is None, f"there is no module {module}, seen from this folder and PYTHONPATH")
        assert found is not None
        script = found
    else:
        refuse(options.script is None, f"name a training script; --help shows the options{equals}")
        script = Path(os.path.abspath(options.script))
        refuse(not script.is_file(), f"there is no script {options.script}")
    refuse_what_is_no_script(script)
    for name in ("nproc", "nodes", "steps", "seconds", "batches"):
        value = getattr(options, name)
        refuse(value is not None and value <= 0, f"--{name} must be larger than 0")
    refuse(options.cpu and options.on_gpus, "--cpu and --on_gpus exclude each other")
    refuse(
        bool(options.preload) and not Path(options.preload).is_file(), f"there is no file {options.preload} (--preload)"
    )
    refuse(options.batches < 2, "--batches must be at least 2: the first and the last")
    guessed, flag = likely_launchers(script)[0]
    settings = {
        "batches": 0 if options.full else options.batches,
        "steps": options.steps or (NO_LIMIT if options.full else 100),
        "redirect": not options.no_redirect,
        "preload": os.path.abspath(options.preload) if options.preload else "",
    }
    return Plan(
        script,
        args,
        module=module,
        launcher=guessed if options.launcher == "auto" else options.launcher,
        ranks=options.nproc * options.nodes,
        nodes=options.nodes,
        local_rank_flag=flag,
        seconds=options.seconds,
        gpus="real" if options.on_gpus else "none" if options.cpu else "null" if options.null_gpu else "standin",
        settings=settings,
    )


def refuse_what_is_no_script(script: Path) -> None:
    """End with the command to use if a file is no Python script, or one that only starts the training script."""
    text = script.read_text(errors="replace")
    if script.suffix == ".ipynb":
        refuse(True, f"{script.name} is a notebook: jupyter nbconvert --to script {script.name} makes a script of it")
    is_shell = script.suffix in (".sh", ".bash", ".slurm", ".sbatch") or re.match(r"#!.*\b(ba|z|k)?sh\b", text)
    starts = started_by(text)
    use = f"name the script that it starts: python doctor/run.py {starts}" if starts else "name the script it starts"
    refuse(bool(is_shell), f"{script.name} is a shell script; {use}")
    only_starts = re.search(r"\bsubprocess\b|os\.(system|exec\w+)\(", text) and re.search(
        r"torchrun|distributed\.(run|launch)|accelerate|deepspeed", text
    )
    trains = re.search(r"init_process_group|backward\(|\.fit\(|\.train\(", text)
    refuse(bool(only_starts and not trains), f"{script.name} starts other programs; {use}")


def working_folder(options: argparse.Namespace, stack: contextlib.ExitStack) -> Path:
    """Return the folder for the runs, which is removed at the end unless it is to be kept."""
    if options.keep:
        folder = Path(os.path.abspath(options.keep))
        refuse(folder.exists() and bool(list(folder.iterdir())), f"--keep {options.keep} is not empty")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="doctor_"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Progress:
    """Shows how far a run is, in one line of a terminal."""

    def __init__(self, name: str) -> None:
        self.name, self.last = name, ""

    def __call__(self, state: str) -> None:
        """Show the state, such as "12 s, 30 updates"."""
        if sys.stderr.isatty() and state != self.last:
            self.last = state
            print(f"\r\033[Kdoctor: {self.name}: {state}", end="", file=sys.stderr, flush=True)

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
    for number, provoked in enumerate(provocations(options, plan, usual), start=1):
        yield run_once(provoked, folder / f"run{number}")
    if options.resume is not None or (options.thorough and writes_files(usual)):
        yield from stop_and_resume(options, plan, usual, folder / "run9")


CUT_COULD_CAUSE = ("same_order",)
"""checks with a possible false fault in cut passes: if the script counts the steps of an epoch itself, its passes begin
too early"""


def confirm(plan: Plan, usual: Run, folder: Path) -> None:
    """Run the script once more with whole passes if a fault could come from cut ones; note in the run what is true."""
    cut = plan.settings["batches"] and any(
        e.get("batches", 0) > plan.settings["batches"] for rank in usual.ranks for e in rank.all("pass")
    )
    doubtful = {f.check for f in judge([usual]).faults if f.check in CUT_COULD_CAUSE} if cut else set()
    if not doubtful:
        return
    whole = replace(plan, name="with whole passes", settings=plan.settings | {"batches": 0, "steps": NO_LIMIT})
    again = judge([run_once(whole, folder / "run7")])
    shutil.rmtree(folder / "run7")
    titles = {check.name: check.title for check in CHECKS}
    usual.launch.refuted = [name for name in sorted(doubtful) if titles[name] in again.fine]
    usual.launch.unconfirmed = [name for name in sorted(doubtful) if titles[name] in again.unjudged]
    write_launch(usual.launch, folder / "run0")


def usual_run(options: argparse.Namespace, plan: Plan, folder: Path) -> tuple[Plan, Run]:
    """Return the ordinary run, with how it was started: in the first way in which all ranks join and train."""
    usual = run_once(plan, folder)
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


def left_out(options: argparse.Namespace, usual: Run) -> list[str]:
    """Return what --thorough leaves out because it could change nothing, and why."""
    if not options.thorough or not usual.any("update"):
        return []
    found = []
    if not usual.any("loader"):
        found += ["uneven data and other workers (no DataLoader was seen)"]
    if usual.world < 2:
        found += ["what needs several ranks"]
    if options.resume is None and not writes_files(usual):
        found += ["a stop and a restart (no file was written)"]
    return found


def provocations(options: argparse.Namespace, plan: Plan, usual: Run) -> Iterator[Plan]:
    """Yield the further runs that were asked for."""

    def provoked(name: str, compared: str = "", **changes: Any) -> Plan:  # noqa: ANN401
        fields = {key: value for key, value in changes.items() if hasattr(plan, key)}
        settings = {key: value for key, value in changes.items() if not hasattr(plan, key)}
        return replace(plan, name=name, compared=compared, settings=plan.settings | settings, **fields)

    several = usual.world > 1
    has_loader = usual.any("loader")
    if options.uneven or (options.thorough and has_loader):
        yield provoked("with uneven data", uneven=True)
    if (options.two_nodes or options.thorough) and several and plan.nodes == 1 and plan.launcher != "spawn":
        yield provoked("as on two nodes", ranks=2, nodes=2)
    if (options.nan or options.thorough) and several:
        yield provoked("with a NaN on rank 1", nan_rank=1)
    if (options.one_rank or options.thorough) and several:
        yield provoked("on one rank", "other_ranks", ranks=1, nodes=1)
    if options.workers or (options.thorough and has_loader):
        has_workers = has_loader and any(e["workers"] for e in usual.first.all("loader"))
        yield provoked(
            "without workers" if has_workers else "with two workers", "other_workers", workers=0 if has_workers else 2
        )


def stop_and_resume(options: argparse.Namespace, plan: Plan, usual: Run, folder: Path) -> Iterator[Run]:
    """Yield a run that is stopped after its first checkpoint, and one that finds what the first has written."""
    updates = len(usual.first.all("update"))
    saves = [e["step"] for rank in usual.ranks for e in rank.events if e["e"] == "save"]
    after = min((step for step in saves if 0 < step < updates), default=updates // 2) + 1
    if after > updates:
        return
    yield run_once(replace(plan, name="stopped", settings=plan.settings | {"stop_after": after}), folder)
    if options.keep:  # the next run needs the same folder, because the checkpoint is in it
        shutil.copytree(folder, folder.with_name("run8"), ignore=shutil.ignore_patterns("files", "removed", "tmp"))
    args = [*plan.args, *shlex.split(options.resume or "")]
    yield run_once(replace(plan, name="stopped and resumed", compared="resumed", args=args), folder)


def print_report(options: argparse.Namespace, runs: list[Run]) -> int:
    """Print the report, write it to files, and return the exit status."""
    usual = runs[0]
    silent = not usual.ranks or not usual.any("update")
    diagnosis = Diagnosis() if silent else judge(runs)
    try:
        accepted = accept(diagnosis, usual.launch.root, options.baseline or "")
    except BaselineError as error:
        refuse(True, str(error))
        raise
    failed = bool(usual.cut or report.errors(usual)) or any(
        status for status in usual.launch.statuses if status is not None
    )
    counted = KINDS[: 1 + KINDS.index(options.fail_on.upper())]
    status = 1 if any(f.kind in counted for f in diagnosis.findings) else 2 if silent or failed else 0
    if options.json or options.format == "json":
        print(report.as_json(runs, diagnosis, status))
    elif options.format == "sarif":
        print(formats.sarif(diagnosis))
    elif options.format == "github":
        print(*formats.github(diagnosis), sep="\n")
        if silent:
            print(f"::error::{report.silent(usual)}".replace("\n", "%0A"))
    elif silent:
        print(report.silent(usual))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(report.text(runs, diagnosis, verbose=options.verbose, colour=colour))
        if accepted.by_comment or accepted.by_baseline:
            print(f"Accepted: {accepted.by_comment} by a comment, {accepted.by_baseline} by the baseline.")
    for where in accepted.unknown:
        print(f"doctor: a comment ignores a check that does not exist: {where}", file=sys.stderr)
    if options.report:
        whole = report.silent(usual) if silent else report.text(runs, diagnosis, verbose=True)
        Path(options.report).write_text(report.page(whole, options.report.endswith(".html")))
    return status

"""Run a training script, unchanged, as several ranks on this machine's CPUs, and report its silent faults.

    rankdoctor train.py --epochs 2             as two ranks on one node; no GPU, no change of the script
    rankdoctor --thorough train.py --epochs 2  also as two nodes, with uneven data, stopped and resumed, and more
    rankdoctor parity --help                   the same training on 1, 2 and 4 ranks, compared

Every pass of a loader ends after some batches, the last one always among them, so that epochs, validation and
checkpoints come soon. Let the script train for two epochs. What it writes goes into a folder of the doctor's, which is
removed.
Exit status: 0 if no fault was found, 1 if one was, 2 if nothing can be said (wrong arguments, the script failed).
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from . import formats, report
from .accepted import BaselineError, accept
from .checks import COST, FAULT, NOTE, Diagnosis, judge
from .launch import LAUNCHERS, NoNullGPU, Plan, file_of_module, likely_launchers, started_by
from .runs import Run, read
from .series import NO_LIMIT, run_all

OLDEST_TORCH = (2, 11)
KINDS = (FAULT, NOTE, COST)


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        """End with exit status 2."""
        refuse(f"{message}; --help shows the options")


NO_CHECKS = {"resume": None, "influence": False, "causal": False, "end_of_text": None, "reference": False}
"""options that a comparison of runs does not have"""


def add_runs(it: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is run, and how."""
    add = it.add_argument
    add("script", metavar="SCRIPT", nargs="?", help="the training script")
    add(
        "args",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="its arguments; {rank} and {node} become the numbers of the rank and of its node",
    )
    add(
        "-m",
        dest="module",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        help="name of a module and its arguments, as for python -m",
    )
    how = it.add_argument_group("how it is run")
    add = how.add_argument
    add(
        "--launcher",
        choices=("auto", *LAUNCHERS),
        default="auto",
        help="launcher to imitate; both: the variables of torchrun and srun; spawn: the script itself "
        "(default: guessed from the script)",
    )
    add("--cpu", action="store_true", help="no GPUs visible to the script (default: one for each rank)")
    add(
        "--gpus_per_task",
        type=int,
        default=0,
        metavar="N",
        help="GPUs that each rank sees, numbered from 0, as with srun --gpus-per-task (default: all of its node)",
    )
    add("--null_gpu", action="store_true", help="run PyTorch's own CUDA code, on GPUs that compute nothing (needs g++)")
    add("--on_gpus", action="store_true", help="run on this machine's GPUs")
    add("--batches", type=int, default=8, help="batches of each pass of a loader (default: 8)")
    add("--full", action="store_true", help="whole passes over the data, and no limit on updates")
    add("--steps", type=int, help="maximum number of updates (default: 100; with --full no limit)")
    add("--seconds", type=float, default=180, help="time limit of each run (default: 180)")
    add("--preload", metavar="FILE", help="Python file to run before the script in each process, such as small data")
    add("--no_redirect", action="store_true", help="no redirection of the files that the script writes")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments; those after the script are the script's own."""
    it = Parser(
        prog="rankdoctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rankdoctor [options] SCRIPT [its arguments]   or   rankdoctor [options] -m MODULE [its arguments]",
    )
    add_runs(it)
    where = it.add_argument_group("ranks")
    add = where.add_argument
    add("--nproc", type=int, default=2, help="ranks on each node (default: 2)")
    add("--nodes", type=int, default=1, help="number of emulated nodes, each with its own local ranks (default: 1)")
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
        help="a stop after the first checkpoint, then a resumed run with these arguments: --resume='--resume last.pt'",
    )
    add("--nan", action="store_true", help="one input on one rank is not a number")
    add("--outliers", action="store_true", help="on one rank a loss is far too large, and validation becomes worse")
    add("--skip", action="store_true", help="one rank skips a batch, where the script has a condition for that")
    add("--one_rank", action="store_true", help="one rank instead of several")
    add("--workers", action="store_true", help="loaders with two workers, or with none if they have some")
    add(
        "--validation",
        action="store_true",
        help="weights that do not move, validated on several ranks and on one (two or three runs)",
    )
    compute = it.add_argument_group("checks that compute something of their own")
    add = compute.add_argument
    add("--influence", action="store_true", help="first batch again, with one sample or one token changed")
    add("--causal", action="store_true", help="the model predicts the next token (for --influence)")
    add("--end_of_text", type=int, metavar="TOKEN", help="token that ends a document (for --influence)")
    add("--reference", action="store_true", help="first update again, with a copy of the model for one process")
    out = it.add_argument_group("report")
    add = out.add_argument
    add("--json", action="store_true", help="the same as --format json")
    add(
        "--format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="format of the report; github: annotations of a workflow (default: text)",
    )
    add(
        "--fail-on",
        "--fail_on",
        choices=("fault", "note", "cost"),
        default="fault",
        help="least serious kind of finding that gives exit status 1 (default: fault)",
    )
    add(
        "--baseline",
        metavar="FILE",
        help="file of known findings, which are not reported; written if it does not exist",
    )
    add("--verbose", action="store_true", help="lists of what was checked, and of what could not be judged")
    add("--report", metavar="FILE", help="additional file for the report: Markdown, or HTML if it ends with .html")
    add("--keep", metavar="FOLDER", help="new folder for the events, the output and the files of the runs")
    add("--reread", metavar="FOLDER", help="folder from --keep to judge again, without a run")
    return it


def main(arguments: list[str] | None = None) -> int:
    """Run, judge, report; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["parity"]:
        from . import parity

        return parity.main(arguments[1:])
    options = parser().parse_args(arguments)
    see_environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored, as in the background
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all ranks are ended
    with contextlib.ExitStack() as stack:
        try:
            if options.reread:
                runs = kept_runs(Path(options.reread))
            else:
                plan = make_plan(options)
                runs = list(run_all(options, plan, working_folder(options, stack)))
            return print_report(options, runs)
        except KeyboardInterrupt:
            print("\nrankdoctor: interrupted; all ranks are ended", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of the report, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 2
        except (OSError, NoNullGPU) as error:
            refuse(str(error))


def see_environment() -> None:
    """End with one line if no rank can run here; warn if PyTorch is older than what the doctor was tested with."""
    if os.name == "nt":
        refuse("Windows lacks what the doctor needs; run it in WSL 2, which is a Linux inside Windows")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        refuse(f"{sys.executable} has no PyTorch: start the doctor with the Python with which your script trains")
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < OLDEST_TORCH:
        print(f"rankdoctor: PyTorch {torch} is older than 2.11; with that the doctor was not tested", file=sys.stderr)


def refuse(message: str) -> NoReturn:
    """End with exit status 2 and one line: something is wrong with the arguments."""
    print(f"rankdoctor: error: {message}", file=sys.stderr)
    sys.exit(2)


def kept_runs(folder: Path) -> list[Run]:
    """Return the runs that --keep has kept."""
    runs = [read(one) for one in sorted(folder.glob("run*")) if (one / "run.json").is_file()]
    return runs or refuse(f"{folder} has no runs in it: name a folder that --keep made")


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the ordinary run that the arguments ask for."""
    script, module, args = what_to_run(options)
    refuse_what_is_no_script(script)
    for name in ("nproc", "nodes", "steps", "seconds", "batches"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            refuse(f"--{name} must be larger than 0")
    if options.gpus_per_task < 0:
        refuse("--gpus_per_task must not be below 0")
    gpus = {"none": options.cpu, "real": options.on_gpus, "null": options.null_gpu}
    if sum(gpus.values()) > 1:
        refuse("--cpu, --null_gpu and --on_gpus exclude each other")
    if options.preload and not Path(options.preload).is_file():
        refuse(f"there is no file {options.preload} (--preload)")
    if options.batches < 2:
        refuse("--batches must be at least 2: the first and the last")
    guessed, flag = likely_launchers(script)[0]
    settings = {
        "batches": 0 if options.full else options.batches,
        "steps": options.steps or (NO_LIMIT if options.full else 100),
        "redirect": not options.no_redirect,
        "preload": os.path.abspath(options.preload) if options.preload else "",
        "influence": options.influence or options.causal or options.end_of_text is not None,
        "causal": options.causal,
        "end_of_text": -1 if options.end_of_text is None else options.end_of_text,
        "reference": options.reference,
    }
    return Plan(
        script,
        args,
        module=module,
        launcher=guessed if options.launcher == "auto" else options.launcher,
        ranks=options.nproc * options.nodes,
        nodes=options.nodes,
        local_rank_flag=flag,
        gpus_per_task=options.gpus_per_task,
        seconds=options.seconds,
        gpus=next((name for name, wanted in gpus.items() if wanted), "standin"),
        settings=settings,
    )


def what_to_run(options: argparse.Namespace) -> tuple[Path, str, list[str]]:
    """Return the file of the script, the name of its module ("": started by its file), and its arguments."""
    if options.module is not None:
        if not options.module:
            refuse("-m needs the name of a module")
        module, *args = options.module
        file = file_of_module(module)
        return file or refuse(f"there is no module {module}, seen from this folder and PYTHONPATH"), module, args
    if options.script is None:
        equals = "; write --resume=ARGS with an equals sign" if options.resume else ""
        refuse(f"name a training script; --help shows the options{equals}")
    script = Path(os.path.abspath(options.script))
    if not script.is_file():
        refuse(f"there is no script {options.script}")
    return script, "", options.args


def refuse_what_is_no_script(script: Path) -> None:
    """End with the command to use if a file is no Python script, or one that only starts the training script."""
    text = script.read_text(errors="replace")
    if script.suffix == ".ipynb":
        refuse(f"{script.name} is a notebook: jupyter nbconvert --to script {script.name} makes a script of it")
    starts = started_by(text)
    use = f"name the script that it starts: rankdoctor {starts}" if starts else "name the script it starts"
    if script.suffix in (".sh", ".bash", ".slurm", ".sbatch") or re.match(r"#!.*\b(ba|z|k)?sh\b", text):
        refuse(f"{script.name} is a shell script; {use}")
    launches = re.search(r"torchrun|distributed\.(run|launch)|accelerate|deepspeed", text)
    starts_programs = re.search(r"\bsubprocess\b|os\.(system|exec\w+)\(", text)
    if starts_programs and launches and not re.search(r"init_process_group|backward\(|\.fit\(|\.train\(", text):
        refuse(f"{script.name} starts other programs; {use}")


def working_folder(options: argparse.Namespace, stack: contextlib.ExitStack) -> Path:
    """Return the folder for the runs, which is removed at the end unless it is to be kept."""
    if options.keep:
        folder = Path(os.path.abspath(options.keep))
        if folder.exists() and any(folder.iterdir()):
            refuse(f"--keep {options.keep} is not empty")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="rankdoctor_"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def print_report(options: argparse.Namespace, runs: list[Run]) -> int:
    """Print the report, write it to files, and return the exit status."""
    usual = runs[0]
    silent = not usual.ranks or not usual.any("update")
    diagnosis = Diagnosis() if silent else judge(runs)
    try:
        accepted = accept(diagnosis, usual.launch.root, options.baseline or "")
    except BaselineError as error:
        refuse(str(error))
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
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(report.text(runs, diagnosis, verbose=options.verbose, color=color))
        if accepted.by_comment or accepted.by_baseline:
            print(f"Accepted: {accepted.by_comment} by a comment, {accepted.by_baseline} by the baseline.")
    for where in accepted.unknown:
        print(f"rankdoctor: a comment ignores a check that does not exist: {where}", file=sys.stderr)
    if options.report:
        whole = report.silent(usual) if silent else report.text(runs, diagnosis, verbose=True)
        Path(options.report).write_text(report.page(whole, options.report.endswith(".html")))
    return status

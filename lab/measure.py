"""Measure what the pages show, on an idle machine: each experiment stores its tables in results/<machine>/.

    python lab/measure.py                               # everything that is measured on CPUs: hours
    python lab/measure.py loaders compare               # some of it
    python lab/measure.py null_half --out DIR           # before a GPU is there: the null GPU's half of a comparison
    python lab/measure.py gpu --minutes 13 --out DIR    # on a machine with GPUs: the most important first
    python lab/measure.py gpu --list true               # its rows and their seconds

What is measured on CPUs does not see the GPUs. With `gpu`, each row is cut at its own limit and stored at once in
DIR/<machine>/, so that a later call with the same DIR goes on at the next row. No failure ends the rest: the last lines
say what was not measured, and why. Then `make docs` renders the pages. It needs no network and no installation:
PYTHONPATH=REPOSITORY:REPOSITORY/tools/nullgpu/src is enough. The whole of it can be tried on null GPUs, which measure
the time of nothing:

    nullgpu --gpus 2 --values python lab/measure.py gpu --tiny true --minutes 30 --out /tmp/DIR
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from lab.flags import Parser
from lab.launching import reason
from lab.measurements import CPU, GPU, TABLES, TINY_DATA, TORCHRUN, Measurement
from lab.results import RESULTS
from workshop.errors import UserError, nearest, run_reporting_user_errors
from workshop.jsonfile import read_json, write_json
from workshop.paths import REPOSITORY

STARTED = time.monotonic()
PYTHON = os.path.abspath(sys.executable)
ROWS = "rows.json"
"""the file in the folder of a machine that says which rows are complete"""
SHORTEST = 20.0
"""seconds that must be left to start a row that goes on where it was cut"""
RESERVE = 10.0
"""seconds before the time limit in which the last row must have ended"""
OF_PEER = 60.0
"""seconds after which a script of --peers is cut"""


starting = False
"""whether a command is being started"""
came: list[int] = []
"""signals that came meanwhile: a command that has started, but is not known yet, would run on"""


def run(
    words: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    seconds: float | None = None,
    log: Path | None = None,
) -> None:
    """Run a command; end it and all that it has started if it takes longer than ``seconds``.

    Args:
        words: the command.
        folder: where it runs.
        environment: of it.
        seconds: time limit.
        log: file for what it prints; None leaves that to the terminal.

    Raises:
        UserError: it failed, or took longer.
    """
    global starting
    errors = subprocess.STDOUT if log else None
    with log.open("w") if log else nullcontext() as out:
        starting = True
        try:
            process = subprocess.Popen(
                words, cwd=folder, env=environment, start_new_session=True, stdout=out, stderr=errors
            )
        except OSError:
            starting = False
            raise
    try:
        starting = False
        if came:
            raise SystemExit(128 + came[0])
        status = process.wait(seconds)
    except BaseException as error:  # also Ctrl-C
        end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Cut(f"cut off after {seconds:.0f} s; what it has stored by then is kept") from None
        raise
    if status:
        why = reason(log.read_text(errors="replace")) if log else "the lines above say why"
        raise UserError(f"exit status {status}: {why}" if log else f"exit status {status}; {why}")


class Cut(UserError):
    """A command was ended before it was done."""


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)  # on which torchrun ends its ranks
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment_of(one: Measurement, out: Path) -> dict[str, str]:
    """Return the environment of a measurement that stores its tables below ``out``."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"WORKSHOP_RESULTS": str(out), "PYTHONPATH": path}
    return environment | ({"CUDA_VISIBLE_DEVICES": ""} if one.gpus == 0 else {})


def words_of(one: Measurement, gpus: int, **places: Path) -> list[str]:
    """Return the command of a measurement on a machine with so many GPUs."""
    filled = one.command.replace(f"{TORCHRUN} gpu", f"{TORCHRUN} {gpus}")
    words = [word.format(**places) for word in shlex.split(filled)]
    python = {"python": [PYTHON], "torchrun": [PYTHON, "-m", "torch.distributed.run"]}
    return [*python.get(words[0], words[:1]), *words[1:]]


# On CPUs.


def measure_all(chosen: list[Measurement], out: Path) -> None:
    """Measure one after the other, with the data that each needs; say at the end what was not measured.

    Raises:
        UserError: something was not measured.
    """
    prepared, missing = set[str](), []
    for one in chosen:
        environment = environment_of(one, out)
        try:
            for data in one.data:
                if data not in prepared:
                    run([PYTHON, "data/prepare.py", *data.split()], REPOSITORY, environment)
                    prepared.add(data)
            print(f"\n== {one.name}: {one.command}", flush=True)
            run(words_of(one, 0), REPOSITORY / one.lesson, environment)
        except (UserError, OSError) as error:
            missing.append(f"{one.name}: not measured: {error}")
            print(missing[-1], file=sys.stderr, flush=True)
    print("", *missing, sep="\n")
    if missing:
        raise UserError(f"{len(missing)} of {len(chosen)} not measured; the lines above say why")


# On GPUs.


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine."""

    name: str
    """of a GPU, for example "NVIDIA H200" or "null GPU (sm_90)"."""
    gpus: int
    folder: str
    """of its stored tables"""

    @property
    def is_null(self) -> bool:
        """Whether its GPUs are null GPUs, on which nothing takes time."""
        return self.name.startswith("null GPU")


ASK = """
import json, torch
from lab.results import machine_name
from workshop.hardware import describe_hardware, pick_device
gpus = torch.cuda.device_count()
name = torch.cuda.get_device_name() if gpus else ""
print("\\n" + json.dumps([name, gpus, machine_name(describe_hardware(pick_device())) if gpus else ""]))
"""


def this_machine(out: Path) -> Machine:
    """Return the GPUs of this machine; another process asks, because asking takes memory of the first GPU.

    Raises:
        UserError: there is none.
    """
    environment = environment_of(GPU[0], out)
    asked = subprocess.run([PYTHON, "-c", ASK], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"the GPUs of this machine cannot be asked for: {reason(asked.stderr)}")
    name, gpus, folder = json.loads(asked.stdout.splitlines()[-1])
    if gpus == 0:
        raise UserError("this machine has no NVIDIA GPU; without gpu, the measurements on CPUs are made")
    return Machine(name, gpus, folder)


def is_measured(one: Measurement, folder: Path) -> bool:
    """Return whether a row is complete: by the list of rows in the folder of the machine, or by its stored table."""
    if read_json(folder / ROWS).get(one.name, {}).get("status") == "complete":
        return True
    table = read_json(folder / f"{one.name}.json")
    return "rows" in table and "unfinished" not in table


def note_row(folder: Path, one: Measurement, status: str, seconds: float, why: str = "") -> None:
    """Store what became of a row, beside the other rows."""
    found = read_json(folder / ROWS)
    before = found.get(one.name, {}).get("seconds", 0.0)
    found[one.name] = {"status": status, "seconds": before + seconds, "command": one.command}
    found[one.name] |= {"why": why} if why else {}
    write_json(folder / ROWS, found)


class Preparation:
    """Data sets that are generated in other processes, beside rows that are not timed."""

    def __init__(self, chosen: Sequence[Measurement], environment: dict[str, str], log: Path) -> None:
        wanted = dict.fromkeys(data for one in chosen for data in one.data)
        self.log = log
        with log.open("w") as out:
            self.running = {
                data: subprocess.Popen(
                    [PYTHON, "data/prepare.py", *data.split()],
                    cwd=REPOSITORY,
                    env=environment,
                    start_new_session=True,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
                for data in wanted
            }

    def wait(self, seconds: float) -> None:
        """Wait until all is there: beside a row that is timed, nothing else runs.

        Raises:
            UserError: it takes longer.
        """
        until = time.monotonic() + seconds
        for data, process in self.running.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise UserError(f"its data are not there in time: data/prepare.py {data}") from None

    def check(self, one: Measurement) -> None:
        """Raise `UserError` if data that this row needs could not be prepared."""
        for data in one.data:
            if self.running[data].returncode:
                raise UserError(f"data/prepare.py {data}: {reason(self.log.read_text(errors='replace'))}")

    def end(self) -> None:
        """End what still runs; a data set is either complete or not there."""
        for process in self.running.values():
            end(process)


def measure_on_gpus(
    chosen: Sequence[Measurement], out: Path, machine: Machine, deadline: float, null_half: Path | None = None
) -> None:
    """Measure row by row until the deadline, with one line for each; say at the end what was not measured.

    Args:
        chosen: the rows, the most important first.
        out: folder for the folder of the machine.
        machine: this one.
        deadline: on the clock `time.monotonic`.
        null_half: file with the null GPU's half of the comparison.

    Raises:
        UserError: something was not measured.
    """
    folder = out / machine.folder
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    impossible = [one for one in chosen if machine.is_null and one.not_on_null]
    chosen = [one for one in chosen if one not in impossible]
    there = [one for one in chosen if is_measured(one, folder)]
    todo = [one for one in chosen if one not in there]
    places = {"folder": folder, "null_half": (null_half or out / NULL_HALF).resolve()}
    missing, notes = [], [f"{one.name}: not on null GPUs: {one.not_on_null}" for one in impossible]
    preparation = Preparation(todo, environment_of(GPU[0], out), folder / "logs/data.txt")
    try:
        for one in chosen:
            if one in there:
                print(f"{one.name:32} complete before", flush=True)
                continue
            began, log = time.monotonic(), folder / "logs" / f"{one.name}.txt"
            status, why = "complete", ""
            try:
                if one.name not in UNTIMED:
                    preparation.wait(deadline - time.monotonic())
                preparation.check(one)
                began = time.monotonic()
                left = deadline - began
                if left < (SHORTEST if one.parts else max(SHORTEST, one.seconds)):
                    raise UserError(f"it takes {one.expected}, and {max(left, 0):.0f} s are left")
                words = words_of(one, machine.gpus, **places)
                run(words, REPOSITORY / one.lesson, environment_of(one, out), min(left, one.limit), log)
            except (UserError, OSError) as error:
                status, why = "cut" if isinstance(error, Cut) else "not measured", str(error)
                missing.append(f"{one.name}: {status}: {error}")
            except BaseException:
                note_row(folder, one, "cut", time.monotonic() - began, "this command was ended")
                raise
            seconds = time.monotonic() - began
            note_row(folder, one, status, seconds, why)
            if log.exists():
                notes += [
                    f"{one.name}: {line[6:]}"
                    for line in log.read_text(errors="replace").splitlines()
                    if line.startswith("note: ")
                ]
            print(f"{one.name:32} {status:12} {seconds:6.1f} s   ({one.expected})", flush=True)
    finally:
        preparation.end()
    print("", *notes, *missing, sep="\n")
    if machine.is_null:
        print(f"These are null GPUs: the times are times of nothing. They are in {folder}, and belong on no page.")
    if missing:
        raise UserError(f"{len(missing)} of {len(chosen)} rows not measured; the lines above say why")


NULL_HALF = "null_half.json"
UNTIMED = ("tests", "lessons_beside_null_gpus")
"""rows beside which data sets may be generated"""


def rows_for(machine: Machine, tiny: bool, peers: Path | None) -> list[Measurement]:
    """Return the rows that this machine can measure, the most important first."""
    scripts = [] if peers is None else sorted(file for file in peers.iterdir() if file.suffix in (".py", ".sh"))
    others = [
        Measurement(
            f"peer_{file.stem}",
            f"{'python' if file.suffix == '.py' else 'bash'} {shlex.quote(str(file.resolve()))}",
            ".",
            gpus=1,
            seconds=OF_PEER / 2,
        )
        for file in scripts
    ]
    chosen = [one for one in (*GPU, *others, *TABLES) if one.gpus <= machine.gpus]
    return [made_tiny(one) for one in chosen] if tiny else chosen


def made_tiny(one: Measurement) -> Measurement:
    """Return a row with as little work as possible, for a test of this command."""
    data = dict.fromkeys(TINY_DATA[words.split()[0]] for words in one.data)
    return replace(
        one, command=f"{one.command} {one.tiny}".strip(), data=tuple(data), seconds=5, measured="", at_most=1800
    )


def measure_null_half(file: Path, out: Path, tiny: bool) -> None:
    """Run the lessons that a GPU will run on null GPUs; the file can be carried to it.

    Raises:
        UserError: there can be no null GPU here.
    """
    words = [PYTHON, "lab/studies/gpu_cases.py", "null", "--null_half", str(file.resolve())]
    environment = environment_of(GPU[0], out)
    if tiny:
        run([*words, "--only", "04, short"], REPOSITORY, environment)
        return
    run(words, REPOSITORY, environment)
    for data in next(one.data for one in GPU if "large" in one.name):
        run([PYTHON, "data/prepare.py", *data.split()], REPOSITORY, environment)
    run([*words, "--large", "true"], REPOSITORY, environment)


def list_rows() -> None:
    """Print the rows with their seconds."""
    total = 0.0
    for one in (*GPU, *TABLES):
        total += one.seconds
        several = f"   needs {one.gpus} GPUs" if one.gpus > 1 else ""
        print(f"{one.name:32} until {total / 60:4.1f} min: {one.expected}{several}")


def end_on_signal(number: int, frame: FrameType | None) -> None:
    """Let the commands that run end too, which are in sessions of their own."""
    if starting:
        came.append(number)
    else:
        raise SystemExit(128 + number)


def main() -> None:
    """Measure what is named on the command line."""
    parser = Parser(__doc__)
    yes_or_no: dict[str, Any] = {"choices": ("true", "false"), "default": "false"}
    known = {one.name: one for one in CPU}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"gpu, null_half, or some of: {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables and plots (default: results/)")
    parser.add_argument("--minutes", type=float, default=13.0, help="time limit, with gpu (default: %(default)s)")
    parser.add_argument("--list", help="print the rows and their seconds, with gpu", **yes_or_no)
    parser.add_argument("--only", metavar="NAME,...", help="some of the rows, with gpu")
    parser.add_argument(
        "--null_half", type=Path, metavar="FILE", help=f"the null GPU's half (default: OUT/{NULL_HALF})"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="scripts (.py, .sh) to run too, with gpu")
    parser.add_argument("--tiny", help="as little work as possible, to try this on null GPUs", **yes_or_no)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end_on_signal)
    out, tiny = arguments.out.resolve(), arguments.tiny == "true"
    if arguments.names == ["gpu"] and arguments.list == "true":
        list_rows()
        return
    if arguments.peers is not None and not arguments.peers.is_dir():
        raise UserError(f"--peers {arguments.peers}: there is no such folder")
    out.mkdir(parents=True, exist_ok=True)
    if arguments.names == ["null_half"]:
        if out == RESULTS and arguments.null_half is None:
            raise UserError("name a folder with --out: a null GPU's half belongs on no page")
        measure_null_half(arguments.null_half or out / NULL_HALF, out, tiny)
        return
    if arguments.names == ["gpu"]:
        machine = this_machine(out)
        if machine.is_null and out == RESULTS:
            raise UserError("these are null GPUs, whose times belong on no page: name another folder with --out")
        chosen = rows_for(machine, tiny, arguments.peers)
        if arguments.only is not None:
            wanted, names = arguments.only.split(","), [one.name for one in chosen]
            if unknown := next((name for name in wanted if name not in names), None):
                raise UserError(f"--only: no row '{unknown}'; {nearest(unknown, names)}")
            chosen = [one for one in chosen if one.name in wanted]
        print(f"{machine.gpus} x {machine.name}; {arguments.minutes:g} minutes; stored in {out / machine.folder}")
        deadline = STARTED + 60 * arguments.minutes - RESERVE
        measure_on_gpus(chosen, out, machine, deadline, arguments.null_half)
        return
    if unknown := next((name for name in arguments.names if name not in known), None):
        raise UserError(f"no measurement '{unknown}'; {nearest(unknown, known)}")
    measure_all([known[name] for name in arguments.names or known], out)


if __name__ == "__main__":
    run_reporting_user_errors(main)

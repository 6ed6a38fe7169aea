"""Measure the figures of the READMEs on this machine and keep them in results/<machine>.json.

    python results/measure.py              # every experiment
    python results/measure.py workers      # one of them

Run it on an idle machine, then `make docs` renders the figures into the pages.
"""

import argparse
import json
import linecache
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import line_profiler

from workshop.distributed import available_cpus, pick_device
from workshop.hardware import describe_hardware, describe_versions
from workshop.paths import REPOSITORY

RESULTS = REPOSITORY / "results"


def run_lesson(lesson: str, *flags: object, launcher: tuple[str, ...] = (sys.executable,)) -> dict[str, Any]:
    """Run a lesson's train.py in a folder of its own; return its summary."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [*launcher, "train.py", *map(str, flags), "--run_dir", run_dir]
        print("$", *command, flush=True)
        subprocess.run(command, cwd=REPOSITORY / lesson, check=True)
        return json.loads((Path(run_dir) / "summary.json").read_text())


def baseline() -> dict[str, Any]:
    """Lesson 01 as it comes: one epoch under the line profiler."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "train.lprof"
        kernprof = (sys.executable, "-m", "kernprof", "-l", "-o", str(profile))
        summary = run_lesson("01_single_gpu", "--config", "../configs/mnist.yaml", launcher=kernprof)
        stats = line_profiler.load_stats(str(profile))
    ((file, first_line, function), timings) = next(item for item in stats.timings.items() if item[1])
    total = sum(time for _, _, time in timings)
    lines = [
        {
            "line": line,
            "hits": hits,
            "seconds": time * stats.unit,
            "percent": 100 * time / total,
            "text": linecache.getline(file, line).rstrip(),
        }
        for line, hits, time in timings
    ]
    return {"epoch": summary["epochs"][0], "function": function, "first_line": first_line, "lines": lines}


def workers() -> dict[str, Any]:
    """Lesson 01 with more and more processes that load data."""
    rows = []
    for num_workers in [0, *(2**i for i in range(available_cpus().bit_length()))]:
        flags = ("--num_workers", num_workers, "--limit_train", 20000, "--limit_val", 1000)
        epoch = run_lesson("01_single_gpu", *flags)["epochs"][0]
        rows.append({"num_workers": num_workers, "samples_per_second": epoch["samples_per_second"]})
    return {"rows": rows}


EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {"baseline": baseline, "workers": workers}


def machine_name() -> str:
    """Return a file name for this machine: its accelerator's name, else its processor's with the CPUs in use."""
    hardware = describe_hardware(pick_device())
    name = hardware.get("device_name") or f"{hardware['cpu']} {hardware['cpus_available']}cpu"
    return re.sub(r"\W+", "_", name.lower()).strip("_")


def main() -> None:
    """Run the experiments named on the command line and merge their figures into this machine's file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"some of: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--machine", default=machine_name(), help="name of the file (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"unknown experiment {', '.join(sorted(unknown))}; known are: {', '.join(EXPERIMENTS)}")

    file = RESULTS / f"{arguments.machine}.json"
    for name in arguments.experiments or EXPERIMENTS:
        figures = EXPERIMENTS[name]()
        record = json.loads(file.read_text()) if file.exists() else {}
        record[name] = {
            "date": date.today().isoformat(),
            "command": f"python results/measure.py {name}",
            "hardware": describe_hardware(pick_device()),
            "versions": describe_versions(),
            **figures,
        }
        file.write_text(json.dumps(record, indent=2) + "\n")
        print(f"{name}: written to {file.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()

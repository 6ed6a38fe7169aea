"""The command line."""

import argparse
import sys
import tempfile
from pathlib import Path

from . import report
from .checks import judge
from .events import read
from .launch import LAUNCHERS, Plan, guess_launcher, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="doctor", description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--launcher", choices=("auto", *LAUNCHERS), default="auto")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--logs")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    script = Path(options.script).absolute()
    launcher, flag = guess_launcher(script)
    scratch = Path(options.logs or tempfile.mkdtemp(prefix="doctor_")).absolute()
    plan = Plan(script, options.args, launcher=launcher if options.launcher == "auto" else options.launcher, ranks=options.nproc, local_rank_flag=flag, seconds=options.seconds)
    run(plan, scratch)
    runs = [read(scratch)]
    diagnosis = judge(runs)
    print(report.text(runs, diagnosis), diagnosis.broken)
    return 1 if diagnosis.faults else 0

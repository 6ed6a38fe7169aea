"""Measure the figures of the READMEs on this machine and keep them in results/<machine>.json.

    python lab/measure.py                    # every experiment
    python lab/measure.py first_changes      # one of them
    python lab/measure.py gpu --minutes 8    # on a machine with GPUs: the most important first, within that time

Run it on an idle machine, then `make docs` renders the figures into the pages.
"""

# ruff: noqa: E402, the clock starts before the imports, which take a while on a machine that reads them the first time
import time

STARTED = time.monotonic()

import subprocess
import sys

from lab import measure_gpu
from lab.experiments import EXPERIMENTS
from lab.flags import Parser
from lab.lesson_runs import RESULTS, last, prepare
from lab.results_file import machine_name, read_results, save_results
from lab.session import Experiment, Session
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError, nearest
from workshop.paths import REPOSITORY


def measure(experiments: list[Experiment], session: Session) -> None:
    """Run experiments and save the figures of each at once; report those that cannot be measured here.

    Raises:
        UserError: some of them could not be measured.
    """
    missing = []
    for experiment in experiments:
        name = experiment.name
        try:
            for data_set in experiment.data:
                prepare(data_set)
            figures = last(experiment.run(session))
            if failed := figures.get("failed"):
                raise UserError("; ".join(f"{part}: {reason}" for part, reason in failed.items()))
            save_results(session.file, name, figures, f"python lab/measure.py {name}")
            print(f"{name}: written to {session.file.relative_to(REPOSITORY)}", flush=True)
        except (UserError, subprocess.CalledProcessError) as error:
            missing.append(name)
            print(f"{name}: not measured: {error}", file=sys.stderr, flush=True)
    if missing:
        raise UserError(f"not measured: {', '.join(missing)}; the lines above say why")


def main() -> None:
    """Run the experiments named on the command line, or all; merge their figures into this machine's file."""
    if sys.argv[1:2] == ["gpu"]:
        measure_gpu.main(sys.argv[2:], STARTED)
        return
    known = {experiment.name: experiment for experiment in EXPERIMENTS if experiment.cpu is not None}
    parser = Parser(__doc__)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"some of: {', '.join(known)}")
    parser.add_argument("--machine", default=machine_name(), help="name of the file (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := next((name for name in arguments.experiments if name not in known), None):
        raise UserError(f"no experiment '{unknown}'; {nearest(unknown, known)}")
    session = Session(RESULTS / f"{arguments.machine}.json", mode="cpu")
    read_results(session.file)  # now, not after minutes
    measure([known[name] for name in arguments.experiments or known], session)


if __name__ == "__main__":
    run_reporting_user_errors(main)

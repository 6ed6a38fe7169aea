"""CPU or GPU? The same computations on one CPU thread, on several, and on an accelerator, from small to large.

    python experiments/cpu_or_gpu.py --all --quick true            # half a minute on two CPUs
    python experiments/cpu_or_gpu.py --all                         # ten minutes, with the large sizes and torch.compile
    python experiments/cpu_or_gpu.py --experiment elementwise      # one experiment

You should see that no backend is the fastest at every size, and that one CPU thread is hard to beat while the work is
small. A time runs from asking for a result until it is there (accelerators are waited for) and is the median over warm
repeats; every result is compared with a float64 reference before it is timed. The computations are in
experiments/computations/, one file each: read branching.py and chained.py first. The largest take 3 GB.
"""

import argparse
from dataclasses import asdict

from backends import find_backends
from computations import EXPERIMENTS
from conclusions import conclude, measured_sweeps, sweep_table
from crossover_plot import plot
from lab.flags import Parser, make_output_folder
from lab.results import write_results
from lab.timing import cpu_share
from sweep import Measurement, run_sweep
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError, nearest, warn
from workshop.hardware import available_cpus, describe_versions, pick_device


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument("--all", action="store_true", help="every experiment")
    parser.add_argument(
        "--experiment",
        action="append",
        default=[],
        metavar="NAME",
        help=f"one of {', '.join(EXPERIMENTS)}; may be given more than once",
    )
    parser.add_switch("--quick", "small sizes, no torch.compile")
    parser.add_out("cpu_or_gpu.json and cpu_or_gpu.png")
    arguments = parser.parse_args()
    if unknown := next((name for name in arguments.experiment if name not in EXPERIMENTS), None):
        raise UserError(f"--experiment: no experiment '{unknown}'; {nearest(unknown, EXPERIMENTS)}")
    if arguments.all == bool(arguments.experiment):
        raise UserError(f"give either --all or --experiment NAME; known are: {', '.join(EXPERIMENTS)}")
    return arguments


def thread_counts(quick: bool = False) -> list[int]:
    """Return the thread counts to sweep: 1, 2, 4, ... and all CPUs of this process; only the ends when quick."""
    cpus = available_cpus()
    doubling = [2**i for i in range(cpus.bit_length())]
    return sorted({1, cpus} if quick else {*doubling, cpus})


def main() -> None:
    """Measure, print and conclude one experiment after the other; then write the results and the plot."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    names = [name for name in EXPERIMENTS if arguments.all or name in arguments.experiment]
    device = pick_device()
    compiles = any(sweep.compiled for name in names for sweep in EXPERIMENTS[name])
    backends, missing = find_backends(device, compiled=compiles and not arguments.quick)
    if compiles and arguments.quick:
        missing["torch.compile"] = "left out by --quick"
    if missing:
        print("not measured:", ", ".join(f"{name} ({reason})" for name, reason in missing.items()))

    shares = [cpu_share()]
    rows, conclusions = [], {}
    for name in names:
        compiles = any(sweep.compiled for sweep in EXPERIMENTS[name])
        found = [
            Measurement(experiment=name, backend=backend, note=f"not measured: {reason}")
            for backend, reason in missing.items()
            if compiles or backend != "torch.compile"
        ]
        for sweep in EXPERIMENTS[name]:
            threads = thread_counts(arguments.quick)
            sweep_rows = list(run_sweep(name, sweep, backends, threads, arguments.quick))
            report(sweep_rows)
            found += sweep_rows
        conclusions[name] = conclude(found)
        print(f"\n=> {name}: {conclusions[name]}", flush=True)
        rows += found
        shares.append(cpu_share())
    if min(shares) < 0.8:
        warn(
            f"at times this process got only {min(shares):.0%} of its CPUs' time: others compute here too, and the "
            "times are too long, those of several threads most of all; measure again when the CPUs are idle"
        )

    figures = {
        "cpu_share": min(shares),
        "versions": describe_versions() | {backend.name: backend.version for backend in backends},
        "conclusions": conclusions,
        "rows": [asdict(row) for row in rows],
    }
    json_file, plot_file = arguments.out / "cpu_or_gpu.json", arguments.out / "cpu_or_gpu.png"
    write_results(json_file, device, figures)
    plot(rows, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}")


def report(rows: list[Measurement]) -> None:
    """Print the table of one sweep, and below it what was noted at the smallest size."""
    for title, measured in measured_sweeps(rows).items():
        print(f"\n{rows[0].experiment}: {title}\n{sweep_table(measured)}", flush=True)
        for row in rows:
            if row.note and row.size in (None, measured[0].size):
                print(f"  {row.label}: {row.note}")


if __name__ == "__main__":
    run_reporting_user_errors(main)

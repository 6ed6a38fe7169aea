"""Measure the figures of emulated_gpu.md: where the time of lesson 01 shows with an emulated GPU.

    python experiments/emulated_study.py                       # some twenty minutes
    python experiments/emulated_study.py --quick true          # one short round, only to see it work

You should see the time of each line before and after the first change, and the throughput by number of workers. You
should also see that loading and computing take as long as the slower of the two if they overlap, and as long as both
together if they do not. All configurations of a part are measured alternately. Flags that are not listed here go to
emulated_gpu.py.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emulated_timeline import plot, step_milliseconds
from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import reason, run_and_read
from lab.lesson_runs import line_profile
from lab.results import write_results
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import pick_device

LESSON = Path(__file__).resolve().parent.parent
SCRIPT = "experiments/emulated_gpu.py"
FEW, ENOUGH = 2, 12
"""workers before and after the first change: the number in NERSC's baseline, and one with which loading is faster"""
WORKERS = (0, 1, 2, 4, 8, 12, 16)
LOG_INTERVALS = (1, 10, 100)
BATCH = 8
"""samples per step: the default of emulated_gpu.py"""
V100_BATCH = 64
"""as in Princeton's lesson"""
V100_WORKERS = (0, 1, 2)
PUBLISHED_FULL = {2: 86.5, 4: 163.2, 8: 274.2, 16: 253.5}
"""samples/s of the third epoch by number of workers: NERSC, https://github.com/NERSC/sc22-dl-tutorial, README, "Data
loading optimizations" """
PUBLISHED_THROUGHPUTS = {
    "2 workers": (89.177, 376.537, 89.971),
    "8 workers": (303.304, 359.426, 252.044),
    "DALI": (779.272, 421.592, 396.084),
    "DALI, AMP": (786.928, 661.640, 512.194),
    "DALI, AMP, APEX, JIT": (792.513, 707.966, 538.593),
}
"""IO, SYNTHETIC and FULL in samples/s, as the tool benchy reports them in the same README"""
KINDS = ("IO", "SYNTHETIC", "FULL")
Trials = dict[str, list[float]]


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return the flags of this script and those for emulated_gpu.py."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="how often all is measured (default: %(default)s)")
    parser.add_switch("--quick", "only to see it work: one round, few samples, short trials")
    parser.add_out("emulated_study.json and the plots")
    arguments, flags = parser.parse_known_args()
    require_positive(arguments, "rounds")
    return arguments, flags


def profiles(configurations: Mapping[str, list[Any]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the milliseconds per step of each line of `train_one_epoch`, a list of rounds, by configuration."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in configurations}
    for _ in range(rounds):
        for name, flags in configurations.items():
            lines = line_profile(*flags, script=SCRIPT)["lines"]
            steps = next(line["hits"] for line in lines if "optimizer.zero_grad()" in line["text"])
            found[name].append({line["text"].strip(): 1e3 * line["seconds"] / steps for line in lines})
    return found


def lines_in_turn(rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return for each line, in the order of the script, the milliseconds per step in each round, and their share."""
    totals = [sum(found.values()) for found in rounds]
    rows = []
    for text in rounds[0]:
        milliseconds = [found[text] for found in rounds]
        share = statistics.mean(one / total for one, total in zip(milliseconds, totals, strict=True))
        rows.append({"text": text, "milliseconds": milliseconds, "share": share})
    return rows


def throughputs(configurations: Mapping[str, list[Any]], rounds: int) -> dict[str, Any]:
    """Return mean, standard deviation and trials of IO, SYNTHETIC and FULL, by configuration."""
    measured: dict[str, Trials] = {name: {kind: [] for kind in KINDS} for name in configurations}
    for _ in range(rounds):
        for name, flags in configurations.items():
            command = [sys.executable, SCRIPT, "--benchmark", "true", *flags]
            found = run_and_read(command, LESSON, flag="--run_dir")
            for kind in KINDS:
                measured[name][kind] += found[kind]["trials"]
            print(f"{name}: " + ", ".join(f"{kind} {found[kind]['mean']:,.1f}" for kind in KINDS), flush=True)
    return {
        name: {
            kind: {"mean": statistics.mean(trials), "std": statistics.stdev(trials), "trials": trials}
            for kind, trials in by_kind.items()
        }
        for name, by_kind in measured.items()
    }


def overlap_flags(io: float, synthetic: float, overlap: bool) -> list[Any]:
    """Return the flags of a run that loads and computes at these samples/s, with and without overlap."""
    durations = ["--load_milliseconds", 1e3 / io, "--gpu_milliseconds", 1e3 / synthetic]
    return [*durations, *(("--num_workers", 1) if overlap else ("--num_workers", 0, "--read_every_step", "true"))]


def predictions(io: float, synthetic: float) -> dict[str, float]:
    """Return FULL in samples/s if loading and computing overlap, and if they do not."""
    return {"overlap": min(io, synthetic), "no overlap": 1 / (1 / io + 1 / synthetic)}


def overlap_rows(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each published triple, with what was measured with an emulated GPU of the same durations."""
    rows = []
    for name, (io, synthetic, full) in PUBLISHED_THROUGHPUTS.items():
        row: dict[str, Any] = {"name": name, "published": {"IO": io, "SYNTHETIC": synthetic, "FULL": full}}
        for how in ("overlap", "no overlap"):
            found = measured[f"{name}, {how}"]
            predicted = predictions(found["IO"]["mean"], found["SYNTHETIC"]["mean"])[how]
            row[how] = found | {"predicted": predicted, "predicted_from_published": predictions(io, synthetic)[how]}
        rows.append(row)
    return rows


def trace_of_six_steps(flags: list[Any], folder: Path) -> Path:
    """Trace six steps into a folder; return the trace.

    Raises:
        UserError: it failed.
    """
    traced = ["--trace", "true", "--limit_train", 20 * BATCH, "--log_interval", 3]
    command = [sys.executable, SCRIPT, *traced, *flags, "--run_dir", folder]
    result = subprocess.run([str(word) for word in command], cwd=LESSON, capture_output=True, text=True)
    if result.returncode:
        raise UserError(reason(result.stderr))
    return folder / "rank0.pt.trace.json.gz"


def timelines(configurations: Mapping[str, list[Any]], title: str, rounds: int, file: Path) -> dict[str, float]:
    """Trace all configurations alternately; plot the run of each that was disturbed least; return its step in ms."""
    with tempfile.TemporaryDirectory() as folder:
        traces: dict[str, list[Path]] = {name: [] for name in configurations}
        for number in range(rounds):
            for place, (name, flags) in enumerate(configurations.items()):
                traces[name].append(trace_of_six_steps(flags, Path(folder, f"{place}_{number}")))
        best = {name: min(found, key=step_milliseconds) for name, found in traces.items()}
        plot(best, title, file)
        return {name: step_milliseconds(trace) for name, trace in best.items()}


def show_lines(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the lines of a profile that take at least half a percent of the time."""
    print(f"\nemulated GPU, {name}: milliseconds per step\n")
    shown = [row for row in rows if row["share"] >= 0.005]
    cells = [(row["text"], f"{statistics.mean(row['milliseconds']):.2f}", f"{row['share']:.1%}") for row in shown]
    print(format_table(["line", "ms", "share"], cells), flush=True)


def show_throughputs(title: str, measured: Mapping[str, Any]) -> None:
    """Print IO, SYNTHETIC and FULL of all configurations."""
    print(f"\nemulated GPU, {title}: samples/s\n")
    found = [
        (name, *(f"{of[kind]['mean']:,.1f} ± {of[kind]['std']:.1f}" for kind in KINDS)) for name, of in measured.items()
    ]
    print(format_table(["", *KINDS], found), flush=True)


def main() -> None:
    """Measure one part after the other; print and write what is known after each."""
    arguments, flags = parse_arguments()
    make_output_folder(arguments.out)
    rounds = 1 if arguments.quick else arguments.rounds
    file = arguments.out / "emulated_study.json"
    figures: dict[str, Any] = {"rounds": rounds, "batch_size": BATCH, "few": FEW, "enough": ENOUGH}
    many_steps = ["--limit_train", (20 if arguments.quick else 600) * BATCH, *flags]
    few_steps = ["--limit_train", (20 if arguments.quick else 80) * BATCH, *flags]
    # Each trial begins with empty workers, so that its first batch is late: long trials make this a small part.
    long_trials = [*flags, "--benchmark_seconds", 0.05 if arguments.quick else 3]
    benchmark = [*flags, "--benchmark_seconds", 0.05 if arguments.quick else 1]
    on_v100 = ["--gpu", "v100", "--batch_size", V100_BATCH, *flags]

    def save(name: str, found: Any) -> None:  # noqa: ANN401
        figures[name] = found
        write_results(file, pick_device(), figures)

    by_line = profiles(
        {
            f"{FEW} workers": ["--num_workers", FEW, *few_steps],
            **{
                f"{ENOUGH} workers, --log_interval {interval}": [
                    *("--num_workers", ENOUGH, "--log_interval", interval, *many_steps)
                ]
                for interval in LOG_INTERVALS
            },
            "V100, 1 worker": [*on_v100, "--num_workers", 1, "--limit_train", 200 * V100_BATCH],
        },
        rounds,
    )
    found = {name: lines_in_turn(of_rounds) for name, of_rounds in by_line.items()}
    for name, rows in found.items():
        show_lines(name, rows)
    save("lines", found)

    workers = throughputs({str(n): ["--num_workers", n, *long_trials] for n in WORKERS}, rounds)
    show_throughputs("by --num_workers", workers)
    save(
        "workers", [{"num_workers": int(n), "published": PUBLISHED_FULL.get(int(n))} | of for n, of in workers.items()]
    )

    configurations = {
        f"{name}, {how}": [*overlap_flags(io, synthetic, how == "overlap"), *benchmark]
        for name, (io, synthetic, _) in PUBLISHED_THROUGHPUTS.items()
        for how in ("overlap", "no overlap")
    }
    measured = throughputs(configurations, rounds)
    show_throughputs("with and without overlap", measured)
    save("overlap", overlap_rows(measured))

    real = throughputs({str(n): [*on_v100, "--num_workers", n, *benchmark] for n in V100_WORKERS}, rounds)
    show_throughputs("V100 durations, loading is real, by --num_workers", real)
    save("v100", [{"num_workers": int(n)} | of for n, of in real.items()])

    plot_rounds = 1 if arguments.quick else 3
    in_turn = {
        f"--num_workers {FEW}": ["--num_workers", FEW, *flags],
        f"--num_workers {ENOUGH}": ["--num_workers", ENOUGH, *flags],
    }
    title = "Emulated GPU: before and after the first change"
    steps = timelines(in_turn, title, plot_rounds, arguments.out / "emulated_workers.png")
    optimized = ["--gpu", "a100_optimized", "--num_workers", 0, *flags]
    overlapping = {
        "the loss is read every 3 steps": optimized,
        "the loss is read in every step": [*optimized, "--read_every_step", "true"],
    }
    title = "Emulated GPU: with and without overlap, no loader workers"
    steps |= timelines(overlapping, title, plot_rounds, arguments.out / "emulated_overlap.png")
    save("timeline_step_milliseconds", steps)
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)

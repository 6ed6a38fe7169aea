"""How far does it scale, and why not further? 1 to 8 ranks with emulated GPUs that really add up their gradients.

    python experiments/emulated_scaling.py                     # some minutes
    python experiments/emulated_scaling.py --rounds 1 --ranks 1 2

You should see that a step without communication takes equally long on any number of ranks, and that a step with
communication becomes longer with each rank. The ranks are started again in every round, and in each of them the kinds
of step are measured alternately. Flags that are not listed here go to emulated_ranks.py.
"""

import argparse
from pathlib import Path
from typing import Any

from emulated_figures import LABELS, plot, rows
from emulated_ranks import Config
from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import run_and_read, torchrun
from lab.results import write_results
from lab.tables import format_seconds, format_table
from workshop.commandline import load_config
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import pick_device

LESSON = Path(__file__).resolve().parent.parent


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return the flags of this script and those for emulated_ranks.py.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="numbers of ranks (default: 1 2 4 8)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often all are started (default: %(default)s)")
    parser.add_out("emulated_scaling.json and emulated_scaling.png")
    arguments, flags = parser.parse_known_args()
    require_positive(arguments, "rounds")
    if min(arguments.ranks) < 1:
        raise UserError(f"--ranks must be 1 or more, got {min(arguments.ranks)}")
    return arguments, flags


def joined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the trials of all rounds together."""
    kinds = rounds[0]["step_seconds"]
    return {
        "step_seconds": {
            kind: [seconds for found in rounds for seconds in found["step_seconds"][kind]] for kind in kinds
        },
        "all_reduce": [message for found in rounds for message in found["all_reduce"]],
    }


def cells(row: dict[str, Any]) -> list[str]:
    """Return what the table shows of a number of ranks."""
    alone, model = row["without_communication"], row.get("predicted")
    found = [str(row["ranks"]), f"{1e3 * alone['mean']:.1f} ± {1e3 * alone['std']:.1f}"]
    found.append(format_seconds(row["all_reduce"]["mean"]) if model else "")
    for kind in LABELS:
        found.append(f"{row[kind]['mean']:.1%} ± {row[kind]['std']:.1%}")
        found.append(f"{model[kind]:.1%}" if model else "")
    return found


def main() -> None:
    """Measure all numbers of ranks, round by round; print, plot and write the results."""
    arguments, flags = parse_arguments()
    config = load_config(Config, flags)
    make_output_folder(arguments.out)
    by_ranks: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in arguments.ranks}
    for _ in range(arguments.rounds):
        for ranks, found in by_ranks.items():
            command = [*torchrun(ranks), "experiments/emulated_ranks.py", *flags]
            found.append(run_and_read(command, LESSON, out=arguments.out, threads=1))
            print(f"{ranks} rank(s): measured", flush=True)
    measured = {ranks: joined(found) for ranks, found in by_ranks.items()}
    gradient_bytes = 4 * config.weights_per_layer * config.layers
    found = rows(measured, config.step_seconds, gradient_bytes, config.layers)
    print("\nemulated GPU, real communication: speed, relative to the same ranks without communication\n")
    header = [
        "ranks",
        "step alone, ms",
        "all-reduce",
        *(text for kind in LABELS.values() for text in (kind, "predicted")),
    ]
    print(format_table(header, [cells(row) for row in found], left=()))
    figures = {
        "batch_size": config.batch_size,
        "gpu_step_seconds": config.step_seconds,
        "gradient_bytes": gradient_bytes,
        "layers": config.layers,
        "rounds": arguments.rounds,
        "trials": config.trials,
        "steps": config.steps,
        "rows": found,
    }
    json_file, plot_file = arguments.out / "emulated_scaling.json", arguments.out / "emulated_scaling.png"
    write_results(json_file, pick_device(), figures)
    plot(found, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)

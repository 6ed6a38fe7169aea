"""How fast are loading (IO), training (SYNTHETIC) and both together (FULL), by loader, workers or model?

    python experiments/throughput.py loaders          # CIFAR-10 with each loader
    python experiments/throughput.py mnist_loaders    # MNIST with each loader
    python experiments/throughput.py worker_counts    # MNIST with 0 to 8 workers
    python experiments/throughput.py models           # CIFAR-10 with a light, a heavier and a heavy model

You should see that the bottleneck moves from loading to training, and that FULL lies between two predictions: that of
no overlap, in which the times of loading and training add up, and that of full overlap, in which the longer one counts.
Flags that are not listed here go to train.py.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import mean_std
from workshop.config import ImageFlags
from workshop.errors import UserError, nearest, run_reporting_user_errors
from workshop.hardware import available_cpus

LESSON = Path(__file__).resolve().parents[1]
KINDS = ("IO", "SYNTHETIC", "FULL")
LOADERS = get_args(get_type_hints(ImageFlags)["loader"])
CIFAR = ("--config", "../configs/cifar10.yaml")
Row = tuple[str, tuple[object, ...]]
"""its first cell, and flags"""


def has_dali() -> bool:
    """Return whether NVIDIA DALI is installed; the package `nvidia` alone is also there without it."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def loaders_of(*flags: object) -> list[Row]:
    """Return a row for each loader whose package is there; without a GPU also `map` without workers."""
    gpu = torch.cuda.is_available()
    workers = max(1, available_cpus() - 2) if gpu else 1  # two CPUs for the training process
    rows: list[Row] = [] if gpu else [("`map, 0 workers`", (*flags, "--loader", "map", "--num_workers", 0))]
    for loader in LOADERS:
        if loader != "dali" or has_dali():
            rows.append((f"`{loader}`", (*flags, "--loader", loader, "--num_workers", workers)))
    return rows


def studies() -> dict[str, tuple[str, str, list[Row]]]:
    """Return title, name of the first column, and rows of each study."""
    small = (*CIFAR, "--batch_size", 32, "--limit_train", 3200)
    counts: list[Row] = [(str(count), ("--num_workers", count)) for count in (0, 1, 2, 4, 8)]
    models: list[Row] = [(name, (*small, "--model", name)) for name in ("cifar_cnn", "resnet18", "resnet152")]
    return {
        "loaders": ("CIFAR-10 with each loader", "`--loader`", loaders_of(*CIFAR)),
        "mnist_loaders": ("MNIST with each loader", "`--loader`", loaders_of("--config", "../configs/mnist.yaml")),
        "worker_counts": ("MNIST by number of workers", "`--num_workers`", counts),
        "models": ("CIFAR-10 with models from small to large", "`--model`", models),
    }


def row_of(first: str, trials: dict[str, list[float]]) -> list[results.Cell]:
    """Return a row of the table: the three throughputs, both predictions, and how close FULL comes to them."""
    cells = [mean_std(trials[kind]) for kind in KINDS]
    io, synthetic, full = (mean for mean, _ in cells)
    in_turn, overlapped = 1 / (1 / io + 1 / synthetic), min(io, synthetic)
    return [first, *cells, in_turn, full / in_turn, overlapped, full / overlapped]


def main() -> None:
    """Measure the study that is named on the command line."""
    parser = Parser(__doc__)
    parser.add_argument("study", help="loaders, mnist_loaders, worker_counts or models")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="all rows are measured so often, in turn (default: 3)")
    arguments, common = parser.parse_known_args()
    known = studies()
    if arguments.study not in known:
        raise UserError(f"no study '{arguments.study}'; {nearest(arguments.study, known)}")
    title, name, rows = known[arguments.study]
    trials: dict[str, dict[str, list[float]]] = {}
    missing: dict[str, str] = {}

    def store(turn: int, finished: bool) -> None:
        results.store(
            arguments.study,
            title=title,
            columns=[name, *KINDS, "no overlap", "of no overlap", "full overlap", "of full overlap"],
            rows=[row_of(first, of_row) for first, of_row in trials.items()],
            formats=dict.fromkeys((*KINDS, "no overlap", "full overlap"), ",.0f")
            | dict.fromkeys(("of no overlap", "of full overlap"), ".0%"),
            unit="samples/s",
            spread=f"mean ± standard deviation of {3 * turn} trials; the rows were measured in turn",
            finished=finished,
        )

    for turn in range(1, arguments.rounds + 1):  # in turn, so that a machine whose speed drifts favors no row
        for first, flags in rows:
            if first in missing:
                continue
            try:
                found = train(LESSON, *flags, *common, "--benchmark", "true", "--benchmark_seconds", arguments.seconds)
            except UserError as error:  # such as DALI with an older driver; the other rows are worth having
                missing[first] = f"{first}: not measured: {error}"
                trials.pop(first, None)
                continue
            of_row = trials.setdefault(first, {kind: [] for kind in KINDS})
            for kind in KINDS:
                of_row[kind] += found[kind]["trials"]
            store(turn, finished=False)
    if not trials:
        raise UserError(f"nothing could be measured; {next(iter(missing.values()))}")
    store(arguments.rounds, finished=True)
    print("", *missing.values(), sep="\n")


if __name__ == "__main__":
    run_reporting_user_errors(main)

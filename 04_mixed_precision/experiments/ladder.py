"""What each option of train.py gains, step by step: the number formats, then one option after the other on top of bf16.

    python experiments/ladder.py                                         # the 3D U-Net: on a GPU the full one
    python experiments/ladder.py --configurations fp32,bf16 --seconds 0.2
    python experiments/ladder.py --rounds 5                              # on a machine whose speed drifts
    python experiments/ladder.py --name precision_ladder_mnist --config ../configs/mnist.yaml --loader device

You should see the samples/s of the step alone (SYNTHETIC), and which configurations differ by more than their spread
from the one that they are compared with. Each is measured in a process of its own, because cuDNN would use again what
it has chosen for another one, and stored at once: a single round that is stopped is continued if it is started again on
the same day. In several rounds all configurations are measured in turn, and compared round by round. Flags that are not
listed here go to train.py.
"""

from statistics import mean

from matplotlib.figure import Figure

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.plots import COLORS, panels
from lab.timing import mean_std, median_range, ratios
from workload import FOLDER, training_device, workload_flags
from workshop.errors import UserError, nearest, run_reporting_user_errors

FORMATS = ("fp32", "tf32", "fp16", "bf16")
OPTIONS = {
    # first: in 16 bits, cuDNN's own guess for a convolution of volumes can be slower than TF32
    "cudnn_benchmark": "true",
    "channels_last": "true",
    "fused": "true",
    "compile": "default",
    "cuda_graph": "true",
}
AGAIN = "again: "
"""before the name of the configuration that is measured a second time, to see how much the machine has changed"""
NAMES = (*FORMATS, *(f"+ {option}" for option in OPTIONS), f"{AGAIN}bf16")
Speed = list[float]
"""mean and standard deviation, in samples/s"""


def flags_of(name: str, done: list[str]) -> list[str]:
    """Return the flags of a configuration: with a +, all options up to it that could be measured before.

    Args:
        name: of `NAMES`.
        done: the names of those that were measured.
    """
    name = name.removeprefix(AGAIN)
    if name in FORMATS:
        return ["--precision", name]
    flags = ["--precision", "bf16" if "bf16" in done else "fp32"]
    for option, value in OPTIONS.items():
        if f"+ {option}" in (name, *done):
            flags += [f"--{option}", value]
    return flags


def compared_with(name: str, done: list[str]) -> str:
    """Return the configuration that one is compared with: fp32, or the one without its option, or its first trial."""
    if name.startswith(AGAIN):
        return name.removeprefix(AGAIN)
    without = [other for other in done if other == "bf16" or other.startswith("+")]
    return without[-1] if name.startswith("+") and without else "fp32"


def difference(speed: Speed, other: Speed) -> str:
    """Return how many times as fast one is, or that the two differ by no more than their spreads together."""
    return "noise" if abs(speed[0] - other[0]) <= speed[1] + other[1] else f"{speed[0] / other[0]:.2g}x"


def difference_by_round(trials: list[list[float]], other: list[list[float]]) -> str:
    """Return how many times as fast one is (median, lowest and highest round), or that not all rounds agree on it."""
    middle, lowest, highest = median_range(ratios([mean(one) for one in other], [mean(one) for one in trials]))
    return "noise" if lowest <= 1 <= highest else f"{middle:.2g}x ({lowest:.2g} to {highest:.2g})"


def plot(speeds: dict[str, Speed]) -> Figure:
    """Plot the samples/s with their spread."""
    figure, (axes,) = panels(1, (8, 1 + 0.4 * len(speeds)))
    means, spreads = zip(*speeds.values(), strict=True)
    axes.barh(list(speeds), means, xerr=spreads, color=COLORS[0], alpha=0.8)
    axes.set_xlabel("samples/s")
    axes.invert_yaxis()
    return figure


def main() -> None:
    """Measure one configuration after the other; store the table after each."""
    parser = Parser(__doc__)
    parser.add_argument("--configurations", metavar="NAME,...", help=f"some of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="each is measured so often (default: %(default)s)")
    parser.add_argument("--name", default="precision_ladder", help="of the stored table (default: %(default)s)")
    arguments, more = parser.parse_known_args()
    names = arguments.configurations.split(",") if arguments.configurations else list(NAMES)
    if unknown := next((name for name in names if name not in NAMES), None):
        raise UserError(f"--configurations: no configuration '{unknown}'; {nearest(unknown, NAMES)}")
    measuring = ("--benchmark", "true", "--benchmark_seconds", arguments.seconds, "--mfu", "true")
    rows = [row for row in results.unfinished_rows(arguments.name) if row[0] in names and arguments.rounds == 1]
    missing: list[str] = []
    trials: dict[str, list[list[float]]] = {}

    def store(finished: bool) -> None:
        results.store(
            arguments.name,
            title="The step with each number format and each option",
            columns=["", "samples/s", "compared with", "MFU", "peak GB"],
            rows=rows,
            formats={"samples/s": ",.0f", "MFU": ".1%", "peak GB": ".1f"},
            spread=f"mean ± standard deviation of {3 * arguments.rounds} trials",
            figure=plot({row[0]: row[1] for row in rows}),
            finished=finished,
        )

    for name in names:
        done = [row[0] for row in rows]
        if name in done:
            continue
        try:
            found = train(FOLDER, *workload_flags(more), *flags_of(name, done), *measuring)
        except UserError as error:
            missing.append(f"{name}: not measured: {error}")
            continue
        trials[name] = [found["SYNTHETIC"]["trials"]]
        speed, base = mean_std(trials[name][0]), compared_with(name, done)
        comparison = next((f"{base}: {difference(speed, row[1])}" for row in rows if row[0] == base), None)
        memory = found["peak_memory_bytes"] / 1e9 if training_device().type == "cuda" else None
        rows.append([name, speed, comparison, found["mfu"]["SYNTHETIC"], memory])
        store(finished=False)
    if not rows:
        raise UserError(f"nothing could be measured; {missing[0]}")
    done = [row[0] for row in rows]
    for _ in range(arguments.rounds - 1):
        for number, name in enumerate(done):
            found = train(FOLDER, *workload_flags(more), *flags_of(name, done[:number]), *measuring)
            trials[name].append(found["SYNTHETIC"]["trials"])
    if arguments.rounds > 1:
        for number, (row, name) in enumerate(zip(rows, done, strict=True)):
            row[1] = mean_std([trial for one in trials[name] for trial in one])
            if row[2]:
                base = compared_with(name, done[:number])
                row[2] = f"{base}: {difference_by_round(trials[name], trials[base])}"
    store(finished=True)
    print("", *missing, sep="\n")


if __name__ == "__main__":
    run_reporting_user_errors(main)

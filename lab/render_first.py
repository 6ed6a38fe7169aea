"""Turn the figures of first_changes.py and the published profiles into parts of lesson 01's pages; cog calls this."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.first_changes import BENCHMARKED
from lab.render import RESULTS, definitions, load, mean_std, not_measured, source, table
from workshop.paths import REPOSITORY

WIDTH = 100
"""characters of a line of a profile: what does not fit is cut off"""


def needs_study(render: Callable[..., str]) -> Callable[..., str]:
    """Have a function say that the study is missing, where there are no results of it."""

    @functools.wraps(render)
    def guarded(*arguments: Any, **named: Any) -> str:  # noqa: ANN401
        return render(*arguments, **named) if load("first_changes") else not_measured("first_changes")

    return guarded


def rows() -> dict[str, dict[str, Any]]:
    """Return the figures of each configuration."""
    return load("first_changes")["rows"]


@needs_study
def profile(case: str) -> str:
    """Render the line profile of the median trial of a configuration, in the columns of ``python -m line_profiler``."""
    lines = ["Line #      Hits         Time  Per Hit   % Time  Line Contents", 62 * "="]
    for line in rows()[case]["profile"]["lines"]:
        if line["percent"] >= 0.5:
            time = line["seconds"] * 1e6
            figures = f"{line['line']:>6} {line['hits']:>9} {time:>12.1f} {time / line['hits']:>8.1f}"
            lines.append(f"{figures} {line['percent']:>8.1f}  {line['text']}"[:WIDTH].rstrip())
    return "\n".join(["```text", *lines, "```"])


@needs_study
def log(case: str) -> str:
    """Render what a configuration prints under ``kernprof``."""
    return "\n".join(["```text", *rows()[case]["log"], "```"])


def share(case: str, start: str) -> float:
    """Return the percentage of the time of the line that begins with ``start``, in the median trial."""
    return sum(line["percent"] for line in rows()[case]["profile"]["lines"] if line["text"].strip().startswith(start))


@needs_study
def loading_share(case: str) -> str:
    """Say what share loading and computing take."""
    compute = sum(share(case, start) for start in ("outputs = model", "loss.backward", "optimizer.step"))
    return (
        f"Here the `for` line takes {share(case, 'for inputs'):.0f} % of the time, and the three lines of the "
        f"computation {compute:.0f} %: this run mostly loads data."
    )


@needs_study
def most_to_gain(case: str) -> str:
    """Say how much could be gained if the line of the data loader took no time."""
    part = share(case, "for inputs") / 100
    return (
        f"The `for` line takes {part:.0%} of the time. Without it, {1 - part:.0%} would remain, so the run would be "
        f"at most 1 / (1 - {part:.2f}) = {1 / (1 - part):.1f} times as fast."
    )


@needs_study
def mnist_conclusion() -> str:
    """Say whether workers and the loader in memory gain more than the trials differ, on MNIST and two CPUs."""
    said = []
    for case, name in (("MNIST, 2 workers", "two workers"), ("MNIST, memory", "`--loader memory`")):
        found = ratios(case, "MNIST, 0 workers")
        low, high = f"{min(found):.2f}", f"{max(found):.2f}"
        if min(found) <= 1 <= max(found):
            said.append(f"With {name} the ratio lies between {low} and {high}: no difference can be claimed.")
        else:
            change = "gains" if min(found) > 1 else "loses"
            said.append(f"With {name} the ratio lies between {low} and {high} in all trials: it {change} a little.")
    return "\n".join(said)


@needs_study
def prediction_errors() -> str:
    """Say which of the two predictions fits, with and without workers."""
    shares = {}
    for case in BENCHMARKED:
        row = rows()[case]
        shares[case] = [row["FULL"]["mean"] / predicted for predicted in together(row)]
    alone = [case for case in BENCHMARKED if "0 workers" in case or case in ("CIFAR-10, map", "CIFAR-10, memory")]
    summed, overlapped = ([shares[case][way] for case in alone] for way in (0, 1))
    return (
        f"Where the training process loads the data itself, FULL is {min(summed):.0%} to {max(summed):.0%} of the "
        f"prediction without overlap, but only {min(overlapped):.0%} to {max(overlapped):.0%} of the smaller of IO and "
        f"SYNTHETIC: the times add up. With four workers that mostly wait, loading and training overlap: FULL is "
        f"{shares['slow files, 4 workers'][1]:.0%} of the smaller one. With one worker that computes on the same two "
        f"CPUs as the training, FULL is {shares['MNIST, 1 worker'][1]:.0%} of the smaller one and "
        f"{shares['MNIST, 1 worker'][0]:.0%} of the prediction without overlap: the two overlap in time, but each "
        "slows the other down."
    )


def data_loader() -> str:
    """Render the call of the ``DataLoader`` in lesson 01's script."""
    lines = definitions("01_single_gpu")["make_loader"]
    start = next(number for number, line in enumerate(lines) if "return DataLoader(" in line)
    return "\n".join(["```python", *(line.removeprefix("    ") for line in lines[start:]), "```"])


def job_file() -> str:
    """Render the job file of lesson 01."""
    return f"```bash-file\n{(REPOSITORY / '01_single_gpu' / 'job.slurm').read_text()}```"


@needs_study
def cprofile(count: int = 12) -> str:
    """Render the functions of Python that take most time, in the columns of ``pstats`` that the page explains."""
    lines = [f"{'ncalls':>8} {'tottime':>8} {'cumtime':>8}  filename:lineno(function)"]
    for row in load("first_changes")["cprofile"][:count]:
        lines.append(f"{row['calls']:>8} {row['tottime']:>8.3f} {row['cumtime']:>8.3f}  {row['name']}"[:WIDTH])
    return "\n".join(["```text", *lines, "```", "", source(load("first_changes"))])


@needs_study
def same_command() -> str:
    """Say how much repeated runs of lesson 01 on MNIST differ: in one sitting, and over all of the results files."""
    speeds = trials("MNIST, 1 worker", "samples_per_second")
    gap = 1 - min(speeds) / max(speeds)
    counts = load("worker_counts")
    one = next(row["FULL"] for row in counts["rows"] if row["num_workers"] == 1)
    whole = load("baseline")
    return "\n".join(
        [
            f"- {len(speeds)} trials in one sitting, 6,400 digits, under the line profiler: "
            f"{', '.join(f'{speed:,.0f}' for speed in speeds)} samples/s. The slowest is {gap:.0%} below the fastest.",
            f"  {source(load('first_changes'))}",
            "- The same flags for a whole epoch, also under the line profiler: "
            f"{whole['epoch']['samples_per_second']:,.0f} samples/s.",
            f"  {source(whole)}",
            f"- The same flags with `--benchmark true`, on another machine: FULL is {mean_std(one)} samples/s.",
            f"  {source(counts)}",
        ]
    )


ASYNCHRONOUS = RESULTS / "asynchronous_launch.png"
COLOURS = {"forward": "#56B4E9", "backward": "#0072B2", "wait": "#CC79A7"}


def draw_asynchronous_launch() -> None:
    """Draw how the CPU launches three steps and then waits for the GPU; a schematic drawing, nothing is measured."""
    figure = Figure(figsize=(10, 2.9), dpi=110, layout="constrained")
    axes = figure.subplots()
    cpu, gpu = 0.3, 0.8
    for step in range(3):
        for kind, launch, work in (("forward", 0.35, 1.5), ("backward", 0.35, 2.0)):
            axes.broken_barh([(cpu, launch)], (0.6, 0.7), color=COLOURS[kind], edgecolor="white")
            axes.broken_barh([(gpu, work)], (-0.6, 0.7), color=COLOURS[kind], edgecolor="white")
            axes.text(gpu + work / 2, -0.25, f"{kind} {step + 1}", ha="center", va="center", color="white", fontsize=9)
            cpu += launch
            gpu += work
    axes.text(0.3, 1.4, "launches forward and backward of three steps", fontsize=9, va="bottom")
    axes.broken_barh([(cpu, gpu - cpu)], (0.6, 0.7), color=COLOURS["wait"])
    text = "loss.item(): waits for all the work that was launched before"
    axes.text((cpu + gpu) / 2, 0.95, text, ha="center", va="center", fontsize=10)
    axes.set(yticks=[-0.25, 0.95], xticks=[], xlabel="time", xlim=(0, gpu + 0.3), ylim=(-0.9, 1.9))
    axes.set_yticklabels(["GPU: does the work", "CPU: Python's lines"], fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ASYNCHRONOUS)


CPU_AND_GPU = RESULTS / "cpu_and_gpu.png"
CORE, CACHE, MEMORY = "#0072B2", "#E69F00", "#999999"


def draw_cpu_and_gpu() -> None:
    """Draw a CPU with few large cores beside a GPU with many small ones; a schematic drawing, not to scale."""
    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    cpu, gpu = figure.subplots(1, 2)
    for number in range(8):
        column, row = number % 4, number // 4
        cpu.add_patch(Rectangle((column * 2.5, 4.2 + row * 2.4), 2.2, 2.1, facecolor=CORE))
        cpu.text(column * 2.5 + 1.1, 5.25 + row * 2.4, "core", ha="center", va="center", color="white", fontsize=10)
    for number in range(20):
        column, row = number % 5, number // 5
        left, bottom = column * 2, 3.2 + row * 1.45
        gpu.add_patch(Rectangle((left, bottom), 1.85, 1.3, facecolor="white", edgecolor="black"))
        for core in range(32):
            place = (left + 0.1 + 0.21 * (core % 8), bottom + 0.12 + 0.28 * (core // 8))
            gpu.add_patch(Rectangle(place, 0.15, 0.2, facecolor=CORE))
    for axes, title, cache, memory in (
        (cpu, "CPU: tens of large cores", 1.5, "host memory: large"),
        (gpu, "GPU: thousands of small cores in multiprocessors (SMs)", 0.7, "GPU memory: smaller, and faster"),
    ):
        axes.add_patch(Rectangle((0, 2.2), 9.7, cache, facecolor=CACHE))
        axes.text(4.85, 2.2 + cache / 2, "caches", ha="center", va="center", fontsize=10)
        axes.add_patch(Rectangle((0, 0.3), 9.7, 1.5, facecolor=MEMORY))
        axes.text(4.85, 1.05, memory, ha="center", va="center", fontsize=10)
        axes.set(xlim=(-0.1, 10), ylim=(0, 9.2))
        axes.set_title(title, fontsize=11, loc="left")
        axes.axis("off")
    figure.savefig(CPU_AND_GPU)


def spread(values: list[float], form: str = "{:.0f}") -> str:
    """Return the median of several trials and the lowest and the highest of them."""
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def trials(case: str, key: str) -> list[float]:
    """Return a figure of each trial of a configuration."""
    return [trial[key] for trial in rows()[case]["trials"]]


def ratios(case: str, base: str) -> list[float]:
    """Return the throughput of a configuration over that of another one, trial by trial."""
    pairs = zip(trials(case, "samples_per_second"), trials(base, "samples_per_second"), strict=True)
    return [one / other for one, other in pairs]


@needs_study
def changes(names: dict[str, str]) -> str:
    """Render the share of the ``for`` line and the throughput of configurations; the ratios are to the first of them.

    Args:
        names: what the table calls each configuration.
    """
    base = next(iter(names))
    cells = [
        (
            name,
            spread(trials(case, "for_percent")),
            spread(trials(case, "samples_per_second"), "{:,.0f}"),
            "1" if case == base else spread(ratios(case, base), "{:.2f}"),
        )
        for case, name in names.items()
    ]
    header = ["", "`for` line, % of the time", "samples/s", "ratio"]
    count = len(trials(base, "for_percent"))
    how = f"Median of {count} trials, and in brackets the lowest and the highest; trials of all rows were run in turn."
    return "\n".join([table(header, cells), "", how, source(load("first_changes"))])


def together(row: dict[str, Any]) -> tuple[float, float]:
    """Return what loading and training give together, in samples/s: one after the other, and with full overlap."""
    io, synthetic = row["IO"]["mean"], row["SYNTHETIC"]["mean"]
    return 1 / (1 / io + 1 / synthetic), min(io, synthetic)


@needs_study
def predictions(names: dict[str, str]) -> str:
    """Render IO, SYNTHETIC and FULL of configurations, and what FULL would be without overlap and with full overlap."""
    cells = []
    for case, name in names.items():
        row = rows()[case]
        without, overlapped = together(row)
        kinds = [mean_std(row[kind]) for kind in ("IO", "SYNTHETIC")]
        cells.append((name, *kinds, f"{without:,.0f}", f"{overlapped:,.0f}", mean_std(row["FULL"])))
    header = ["", "IO", "SYNTHETIC", "no overlap", "full overlap", "FULL, measured"]
    count = len(rows()[next(iter(names))]["IO"]["trials"])
    how = f"In samples/s, mean ± standard deviation of {count} trials."
    return "\n".join([table(header, cells), "", how, source(load("first_changes"))])


def per_step(case: str, batch_size: int) -> tuple[float, float, float]:
    """Return the milliseconds of a step that a configuration loads, computes, and takes in all, each by itself."""
    row = rows()[case]
    return tuple(1000 * batch_size / row[kind]["mean"] for kind in ("IO", "SYNTHETIC", "FULL"))  # type: ignore[return-value]


PRINCETON_LINES = (  # line, hits, seconds, % of the time, text
    (42, 2817, 40.01, 82.6, "for batch_idx, (data, target) in enumerate(train_loader):"),
    (43, 2814, 0.20, 0.4, "    data, target = data.to(device), target.to(device)"),
    (44, 2814, 0.35, 0.7, "    optimizer.zero_grad()"),
    (45, 2814, 2.24, 4.6, "    output = model(data)"),
    (46, 2814, 0.10, 0.2, "    loss = F.nll_loss(output, target)"),
    (47, 2814, 2.85, 5.9, "    loss.backward()"),
    (48, 2814, 2.66, 5.5, "    optimizer.step()"),
)
"""published at https://github.com/PrincetonUniversity/multi_gpu_training/tree/main/01_single_gpu: a V100, 1 worker"""


def princeton_profile() -> str:
    """Render the line profile that Princeton's lesson shows, shortened; the figures are theirs."""
    lines = [f"{'Line':>4} {'Hits':>5} {'Seconds':>8} {'% Time':>7}  Line contents"]
    lines += [f"{line:>4} {hits:>5} {s:>8.2f} {share:>7.1f}  {text}" for line, hits, s, share, text in PRINCETON_LINES]
    return "\n".join(["```text", *lines, "```"])


NERSC = (  # their loader, IO, SYNTHETIC, FULL
    ("PyTorch's DataLoader, 2 workers", 89.177, 376.537, 89.971),
    ("PyTorch's DataLoader, 8 workers", 303.304, 359.426, 252.044),
    ("NVIDIA DALI, 4 threads", 779.272, 421.592, 396.084),
)
"""published at https://github.com/NERSC/sc22-dl-tutorial: a 3D U-Net on an A100 of 40 GB, batch size 64"""


def nersc_table(fold_full: bool = False) -> str:
    """Render the throughput that NERSC's tutorial shows, and the predictions; the figures are theirs."""
    cells = []
    for name, io, synthetic, full in NERSC:
        shown = (
            f"{io:,.0f}",
            f"{synthetic:,.0f}",
            f"{1 / (1 / io + 1 / synthetic):,.0f}",
            f"{min(io, synthetic):,.0f}",
        )
        cells.append((name, *shown[:2]) if fold_full else (name, *shown[2:], f"{full:,.0f}"))
    header = ["", "IO", "SYNTHETIC"] if fold_full else ["", "no overlap", "full overlap", "FULL, measured"]
    return table(header, cells)


if __name__ == "__main__":
    draw_asynchronous_launch()
    draw_cpu_and_gpu()

"""Turn the figures of first_changes.py and the published profiles into parts of lesson 01's pages; cog calls this."""

import json
import re
import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.example_figures import ABOUT, COMMANDS, JOB_LOG
from lab.render import RESULTS, definitions, figure, load, mean_std, not_measured, source, table
from lab.render_ddp import SPEEDS
from workshop.paths import REPOSITORY

KINDS = ("IO", "SYNTHETIC", "FULL")
WIDTH = 100
"""characters of a line of a profile: what does not fit is cut off"""


def profile(case: str) -> str:
    """Render the line profile of the median trial, without the columns that depend on the machine."""
    results = load("first_changes")
    if not results:
        return not_measured("first_changes")
    lines = ["Line #      Hits   % Time  Line Contents", 62 * "="]
    for line in results["rows"][case]["profile"]["lines"]:
        if line["percent"] >= 0.5:
            lines.append(
                f"{line['line']:>6} {line['hits']:>9} {line['percent']:>8.1f}  {line['text']}"[:WIDTH].rstrip()
            )
    return "\n".join(["```text", *lines, "```"])


def shares(*cases: str) -> str:
    """Say what percentage of the time the line of the data loader took in all trials of some configurations."""
    results = load("first_changes")
    if not results:
        return not_measured("first_changes")
    said = []
    for case in cases:
        found = [trial["for_percent"] for trial in results["rows"][case]["trials"]]
        said.append(f"{min(found):.0f} to {max(found):.0f} %")
    how = f"In {results['rounds']} trials the `for` line took {', then '.join(said)} of the time."
    if results["cpus_used"] < 0.75 * results["hardware"]["cpus_available"]:
        how += " (Other work kept the CPUs busy, so the profile shows shares only, and no times.)"
    return f"{how}\n{source(results)}"


def timelines(what: str) -> str:
    """Return the figure of six steps with 0, 1 and 4 workers and a slow file system; ``what`` says what one sees."""
    results = load("loading_timelines")
    if not results.get("slow_files"):  # missing in older results, which are of other data
        return not_measured("loading_timelines")
    return f"{figure('loading_timelines', what)}\n\n{source(results)}"


def computing_beside_workers() -> str:
    """Say how long the steps of the figure compute, by number of workers."""
    results = load("loading_timelines")
    if not results.get("slow_files"):
        return not_measured("loading_timelines")
    rows = {row["num_workers"]: row["step_milliseconds"] - row["data_milliseconds"] for row in results["rows"]}
    said = [f"{ms:.0f} ms with {count or 'no'} worker{'s' * (count != 1)}" for count, ms in rows.items()]
    text = f"In these steps everything but *data* took {', '.join(said)} (one run of each)."
    if rows[0] < min(ms for count, ms in rows.items() if count):
        text += (
            " So the computation was slower beside workers, although they mostly wait. The probable reason is that "
            "what they do compute takes time of the same CPUs."
        )
    return text


BATCHES = {"cifar10": 128, "mnist": 64}
"""samples per step of the two configurations"""


def alone(name: str) -> dict[str, dict[str, Any]]:
    """Return IO, SYNTHETIC and FULL of small images by the name of the loader, or of MNIST by "0 workers" and so on."""
    if name in load("loaders")["loaders"]:
        return load("loaders")["loaders"][name]
    count = int(name.partition(" ")[0])
    return next(row for row in load("worker_counts")["rows"] if row["num_workers"] == count)


def step_milliseconds(name: str, data_set: str) -> tuple[float, float, float]:
    """Return the milliseconds of a step of loading alone, of training alone, and of both together."""
    io, synthetic, full = (1000 * BATCHES[data_set] / alone(name)[kind]["mean"] for kind in KINDS)
    return io, synthetic, full


TAUGHT_BELOW = (
    "This is what `--benchmark true` calls FULL; the section [What is the bottleneck?](#what-is-the-bottleneck) "
    "teaches it."
)
RATIO = (
    "Each trial measured every row once, one after the other. The ratio is the median of the ratios within a trial, "
    "not the ratio of the medians."
)


def limit_of_gain(share: float) -> str:
    """Say how many times as fast a run can become at most without what takes this share of its time.

    It is computed from the percentage that the page shows, so that a reader who computes it gets the same.
    """
    rest = 1 - round(share, 2)
    return f"1 / {rest:.2f} = {1 / rest:.1f}"


def expected_share(name: str, data_set: str) -> float:
    """Return the share of loading in a step without overlap, from the times of loading alone and of training alone."""
    io, synthetic, _ = step_milliseconds(name, data_set)
    return io / (io + synthetic)


def loading_share() -> str:
    """Say what share loading has of a step of small images without workers."""
    io, synthetic, _ = step_milliseconds("map, 0 workers", "cifar10")
    return (
        f"Loading and training were also measured one at a time, without a profiler: loading a batch took {io:.0f} ms, "
        f"and training on it {synthetic:.0f} ms (means of three trials). From these times the `for` line should take "
        f"about {expected_share('map, 0 workers', 'cifar10'):.0%} of the time.{of_another_machine('loaders')} Both "
        f"measurements say the same: this run mostly loads data.\n{source(load('loaders'))}"
    )


def of_another_machine(experiment: str) -> str:
    """Say that an experiment was measured on another machine than the line profiles; nothing, if it was the same."""
    here, there = (
        [load(name)["hardware"].get(key) for key in ("device_name", "cpu", "cpu_instructions")]
        for name in (experiment, "first_changes")
    )
    other = " This was another machine than that of the profile, so the figures need not be equal."
    return "" if here == there else other


def share_in_profile(case: str) -> float:
    """Return the share of the `for` line in the line profile that the page shows, the one of the median trial."""
    percents = [trial["for_percent"] for trial in load("first_changes")["rows"][case]["trials"]]
    return statistics.median(percents) / 100


def most_to_gain(case: str) -> str:
    """Say how much could be gained if loading took no time, by the line profile that the page shows."""
    part = round(share_in_profile(case), 2)
    return (
        f"In the profile above the `for` line takes {part:.0%} of the time, so {1 - part:.0%} remain without it. "
        f"Therefore the run would be at most {limit_of_gain(part)} times as fast."
    )


LOADER_NAMES = {"CIFAR-10, map": "`--loader map --num_workers 0`", "CIFAR-10, memory": "`--loader memory`"}
"""of the two runs whose speeds are compared, by their names in the results"""


def loader_gain() -> str:
    """Render what the loader in memory gains over the training process that loads image by image."""
    results = load("first_changes")
    trials = {name: results["rows"][name]["trials"] for name in LOADER_NAMES}
    speeds = {name: [trial["samples_per_second"] for trial in found] for name, found in trials.items()}
    first, last = LOADER_NAMES
    ratios = [after / before for before, after in zip(speeds[first], speeds[last], strict=True)]
    cells = []
    for name, shown in LOADER_NAMES.items():
        shares_of_trials = spread([trial["for_percent"] for trial in trials[name]])
        ratio = "1" if name == first else spread(ratios, "{:.1f}")
        cells.append((shown, shares_of_trials, spread(speeds[name], "{:,.0f}"), ratio))
    header = ["", "`for` line, % of the time", "samples/s", "ratio"]
    how = f"Median of {results['rounds']} trials, and in brackets the lowest and the highest."
    how += f" {RATIO}"
    most = 1 / (1 - round(share_in_profile(first), 2))
    if max(ratios) > most:
        how += (
            f" The highest ratio is above the {most:.1f} of exercise 1. That limit assumes that all other lines take "
            "exactly as long as before, and here the speed of the machine differed between the trials."
        )
    return "\n".join([table(header, cells), "", how, source(results)])


def loader_gain_without_profiler() -> str:
    """Say what the same change gains by the throughput of both loaders, measured without a profiler."""
    before, after = alone("map, 0 workers"), alone("memory")
    ratios = [one / before["FULL"]["mean"] for one in after["FULL"]["trials"]]
    part = expected_share("map, 0 workers", "cifar10")
    where = " and on another machine" if of_another_machine("loaders") else ""
    return (
        f"The same change, measured without a profiler{where}: from {mean_std(before['FULL'])} to "
        f"{mean_std(after['FULL'])} samples/s, which is {min(ratios):.1f} to {max(ratios):.1f} times as many. "
        f"(Loading and training together, mean ± standard deviation of three trials. {TAUGHT_BELOW}) There, by the "
        f"times above, loading takes {part:.0%} of a step, so at most a factor of {limit_of_gain(part)} was to be "
        f"expected.\n{source(load('loaders'))}"
    )


def limit_with_memory() -> str:
    """Say what the limit is if the time that the loader in memory needs is not left out."""
    load_before, train_before, _ = (round(found) for found in step_milliseconds("map, 0 workers", "cifar10"))
    load_after, train_after, _ = step_milliseconds("memory", "cifar10")
    load_after = round(load_after, 1)
    limit = (load_before + train_before) / (load_after + train_before)
    text = (
        "Both limits, that of exercise 1 and the last one, are those of a loader that takes no time. `memory` takes a "
        "little: in the second measurement, "
        f"loading a batch with it takes {load_after:.1f} ms. This lowers the second limit to ({load_before} + "
        f"{train_before}) / ({load_after:.1f} + {train_before}) = {limit:.1f}."
    )
    if round(train_after) > train_before:
        text += (
            " It was not reached, because training alone was slower there with `memory` "
            f"({train_after:.0f} ms per batch) than with `map` ({train_before} ms). We did not investigate why."
        )
    return text


def mnist_gain() -> str:
    """Render what workers gain on MNIST, and say whether it is more than the spread."""
    base = alone("0 workers")["FULL"]
    cells, said = [], []
    for count in (0, 1, 2):
        full = alone(f"{count} workers")["FULL"]
        difference, limit = full["mean"] - base["mean"], full["std"] + base["std"]
        cells.append((f"`--num_workers {count}`", mean_std(full), f"{full['mean'] / base['mean']:.2f}"))
        if count:
            word = "faster" if difference > 0 else "slower"
            noise = "no difference beyond the spread"
            name = "1 worker" if count == 1 else f"{count} workers"
            said.append(f"{name}: {word if abs(difference) > limit else noise}.")
    part = expected_share("0 workers", "mnist")
    how = (
        f"Loading and training together, mean ± standard deviation of three trials. {TAUGHT_BELOW}"
        f"{of_another_machine('worker_counts')} By the times of loading alone and training alone, loading takes "
        f"{part:.0%} of a step there, so workers could gain at most a factor of {limit_of_gain(part)}. "
        + " ".join(said)
    )
    return "\n".join([table(["", "samples/s", "ratio"], cells), "", how, source(load("worker_counts"))])


def together(row: dict[str, Any]) -> tuple[float, float]:
    """Return what loading and training give together, in samples/s: one after the other, and with full overlap."""
    io, synthetic = row["IO"]["mean"], row["SYNTHETIC"]["mean"]
    return 1 / (1 / io + 1 / synthetic), min(io, synthetic)


PREDICTED = {
    "map, 0 workers": "CIFAR-10, 0 workers",
    "memory": "CIFAR-10, `--loader memory`",
    "0 workers": "MNIST, 0 workers",
    "1 worker": "MNIST, 1 worker",
    "2 workers": "MNIST, 2 workers",
}
"""what the tables call these configurations"""


def predictions(*, with_full: bool = True) -> str:
    """Render IO and SYNTHETIC, or what follows from them without overlap and with full overlap, beside FULL."""
    cells: list[tuple[str, ...]] = []
    for name, shown in PREDICTED.items():
        row = alone(name)
        if with_full:
            without, overlapped = together(row)
            full = row["FULL"]["mean"]
            cells.append(
                (
                    shown,
                    f"{without:,.0f}",
                    f"{overlapped:,.0f}",
                    mean_std(row["FULL"]),
                    f"{full / without:.0%}",
                    f"{full / overlapped:.0%}",
                )
            )
        else:
            cells.append((shown, mean_std(row["IO"]), mean_std(row["SYNTHETIC"])))
    full_header = ["", "no overlap", "full overlap", "FULL, measured", "of no overlap", "of full overlap"]
    how = "In samples/s, mean ± standard deviation of three trials."
    sources = [source(load(name)) for name in ("loaders", "worker_counts")]
    return "\n".join([table(full_header if with_full else ["", "IO", "SYNTHETIC"], cells), "", how, *sources])


def data_loader() -> str:
    """Render the call of the ``DataLoader`` in lesson 01's script."""
    lines = definitions("01_single_gpu")["make_loader"]
    start = next(number for number, line in enumerate(lines) if "return DataLoader(" in line)
    return "\n".join(["```python", *(line.removeprefix("    ") for line in lines[start:]), "```"])


def job_file() -> str:
    """Render the job file of lesson 01."""
    return f"```bash-file\n{(REPOSITORY / '01_single_gpu' / 'job.slurm').read_text()}```"


def same_command() -> str:
    """Say how much repeated runs of lesson 01 on MNIST with one worker differ: in one sitting, and between days."""
    runs = next(row for row in load("success_rate")["rows"] if row["name"] == "standard")["runs"]
    seconds = [run["process_seconds"] for run in runs]
    apart = max(seconds) / min(seconds) - 1
    fast_runs = load("fast")["runs"]["baseline"]
    others = (
        ("an epoch under the line profiler, once", "baseline", load("baseline")["epoch"]["samples_per_second"]),
        ("FULL of `--benchmark true`, mean of three", "worker_counts", alone("1 worker")["FULL"]["mean"]),
        ("an epoch of 20,000 digits, once", "workers", load("workers")["rows"][1]["samples_per_second"]),
        ("an epoch, median of three", "fast", statistics.median(run["samples_per_second"] for run in fast_runs)),
    )
    speeds = [speed for _, _, speed in others]
    cells = [
        (how, load(name)["hardware"].get("cpu_instructions", "not noted"), load(name)["date"], f"{speed:,.0f}")
        for how, name, speed in others
    ]
    same = load("success_rate")
    return "\n".join(
        [
            f"Three runs in one sitting, with different seeds, took {', '.join(f'{s:.1f}' for s in seconds)} s "
            f"for the whole process. The slowest took {apart:.0%} longer than the fastest.",
            source(same),
            "",
            "But this is what the same flags gave on different days, on different machines and in different ways:",
            "",
            table(["what was measured", "machine", "date", "samples/s"], cells),
            "",
            "All machines are virtual ones with two CPUs of an AMD EPYC; *machine* is the newest kind of vector "
            "instructions that they have. The largest of these figures is "
            f"{max(speeds) / min(speeds):.1f} times the smallest. So a figure in samples/s means little without "
            "the machine, the day and the way in which it was measured.",
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


def slow_files() -> str:
    """Render what 0, 1 and 4 workers gain with the slow file system."""
    results = load("slow_files")
    if not results:
        return not_measured("slow_files")
    trials = {name: row["trials"] for name, row in results["rows"].items()}
    first = next(iter(trials))
    speeds = {name: [trial["samples_per_second"] for trial in found] for name, found in trials.items()}
    cells = []
    for name, found in trials.items():
        ratios = [one / other for one, other in zip(speeds[name], speeds[first], strict=True)]
        cells.append(
            (
                name,
                spread([trial["for_percent"] for trial in found]),
                spread(speeds[name]),
                "1" if name == first else spread(ratios, "{:.1f}"),
            )
        )
    header = ["", "`for` line, % of the time", "samples/s", "ratio"]
    how = f"Median of {results['rounds']} trials, and in brackets the lowest and the highest."
    how += f" {RATIO}"
    return "\n".join([table(header, cells), "", how, source(results)])


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


def job_log() -> str:
    """Return the log of a job that was run for the page, without the speeds."""
    if not JOB_LOG.exists():
        return "*Not run yet: `python lab/example_figures.py job`.*"
    command, _, text = JOB_LOG.read_text().partition("\n")
    if command != f"$ {COMMANDS['job'][1]}":
        raise ValueError("python lab/example_figures.py job: the command has changed")
    for pattern in SPEEDS:
        text = re.sub(pattern, "  ...", text, flags=re.MULTILINE)
    return f"```text\n{text}```"


def example_figure(name: str, file: str, what: str, above: str = "..") -> str:
    """Return the link to a plot of lab/example_figures.py, and where it was made; ``above`` leads to the repository."""
    about = json.loads(ABOUT.read_text()).get(name) if ABOUT.exists() else None
    if about is None:
        return f"*Not made yet: `python lab/example_figures.py {name}`.*"
    return f"![{what}]({above}/results/{file})\n\n{source(about).replace('Measured', 'Made')}"


NERSC = (  # their loader; IO, SYNTHETIC and FULL, each with its +/-
    ("PyTorch's DataLoader, 2 workers", (89.177, 1.011), (376.537, 0.604), (89.971, 0.621)),
    ("PyTorch's DataLoader, 8 workers", (303.304, 1.468), (359.426, 3.380), (252.044, 0.253)),
    ("NVIDIA DALI, 4 threads", (779.272, 1.352), (421.592, 0.008), (396.084, 0.058)),
)
"""published at https://github.com/NERSC/sc22-dl-tutorial: a 3D U-Net on an A100 of 40 GB, batch size 64"""


def nersc_table(fold_full: bool = False) -> str:
    """Render the throughput that NERSC's tutorial shows, and the predictions; the figures are theirs."""
    cells = []
    for name, *measured in NERSC:
        shown = [f"{mean:,.1f} ± {deviation:,.1f}" for mean, deviation in measured]
        (io, _), (synthetic, _), _ = measured
        predicted = (f"{1 / (1 / io + 1 / synthetic):,.0f}", f"{min(io, synthetic):,.0f}")
        cells.append((name, *shown[:2]) if fold_full else (name, *predicted, shown[2]))
    header = ["", "IO", "SYNTHETIC"] if fold_full else ["", "no overlap", "full overlap", "FULL, measured"]
    return table(header, cells)


if __name__ == "__main__":
    draw_asynchronous_launch()
    draw_cpu_and_gpu()

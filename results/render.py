"""Turn figures on record and differences between scripts into parts of the READMEs; cog calls this (`make docs`)."""

import difflib
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
MACHINE = "amd_epyc_avx512_2cpu"
"""the machine whose figures the pages show, a CPU with bf16 instructions"""
WITHOUT_BF16 = "amd_epyc_avx2_2cpu"
"""another machine, without them"""
ELSEWHERE = dict.fromkeys(("fast", "scaling", "allreduce"), WITHOUT_BF16)
"""the machine of these experiments, where it is not the first"""
BY_MANY = ("compare", "scaling", "allreduce", "unet3d_scaling")
"""what is best shown of a machine with many GPUs; all else of one GPU"""


def machine_of(experiment: str) -> str:
    """Return the name of the machine whose figures of an experiment the pages show."""
    return ELSEWHERE.get(experiment, MACHINE)


def load(experiment: str, machine: str | None = None) -> dict[str, Any] | None:
    """Return the record of an experiment, on ``machine`` or the one the pages show; None if not measured there."""
    file = RESULTS / f"{machine or machine_of(experiment)}.json"
    return json.loads(file.read_text()).get(experiment) if file.exists() else None


def load_whole(experiment: str, machine: str) -> dict[str, Any] | None:
    """Return the record of an experiment on the GPUs of ``machine``; None if it is missing or was cut off."""
    record = load(experiment, machine)
    whole = record and not record.get("unfinished") and record["hardware"]["device"] == "cuda"
    return record if whole else None


def gpu_machine(experiment: str) -> str | None:
    """Return the name of a machine that has a whole record of an experiment on its GPUs; None if none has."""
    found = []
    for file in RESULTS.glob("*gpu.json"):
        if record := load_whole(experiment, file.stem):
            found.append((record["hardware"]["gpus"], file.stem))
    return sorted(found, reverse=experiment in BY_MANY)[0][1] if found else None


def on_gpu(experiment: str) -> dict[str, Any] | None:
    """Return the record of an experiment on a GPU; None if there is none."""
    name = gpu_machine(experiment)
    return load(experiment, name) if name else None


Rendering = Callable[..., str]


def also_on_gpu(experiment: str) -> Callable[[Rendering], Rendering]:
    """Have a function render the pages' machine and then a GPU, if an experiment was measured on one."""

    def decorate(one: Rendering) -> Rendering:
        @functools.wraps(one)
        def both(machine: str | None = None) -> str:
            gpu = None if machine else gpu_machine(experiment)
            return "\n\n".join([one(machine), *([one(gpu)] if gpu else [])])

        return both

    return decorate


def picture(experiment: str, what: str, machine: str | None = None) -> str:
    """Return the plot of an experiment, for a lesson's page; ``what`` says what it shows."""
    return f"![{what}](../results/{machine or machine_of(experiment)}_{experiment}.png)"


def not_measured(experiment: str) -> str:
    """Say that a record is missing, and how to get it."""
    return f"*Not measured yet: `python results/measure.py {experiment}`.*"


def machine(record: dict[str, Any]) -> str:
    """Say where and with what a record was measured."""
    hardware, versions = record["hardware"], record["versions"]
    instructions = hardware.get("cpu_instructions")  # older records are silent on that
    cpus = f"{hardware['cpus_available']} CPUs of an {hardware['cpu']}{f' ({instructions})' if instructions else ''}"
    where = hardware.get("device_name") or cpus
    return f"{where}, torch {versions['torch']}, Python {versions['python']}, {record['date']}"


def source(record: dict[str, Any]) -> str:
    """Return the caption under a table: where it was measured and the command that measures it again."""
    return f"*Measured on {machine(record)}, with `{record['command']}`.*"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, all columns but the first aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@also_on_gpu("baseline")
def line_profile(machine: str | None = None) -> str:
    """Render the line profile of lesson 01's baseline: the lines that took at least 0.1 % of the time."""
    record = load("baseline", machine)
    lines = [f"{'Line':>4} {'Hits':>6} {'Seconds':>8} {'% Time':>7}  Line contents"]
    for line in record["lines"]:
        if line["percent"] >= 0.1:
            figures = f"{line['line']:>4} {line['hits']:>6} {line['seconds']:>8.2f} {line['percent']:>7.1f}"
            lines.append(f"{figures}  {line['text']}")
    return "\n".join(["```text", *lines, "```", "", source(record)])


@also_on_gpu("baseline")
def baseline_epoch(name: str | None = None) -> str:
    """Render one sentence on what one epoch of lesson 01 gives and costs."""
    record = load("baseline", name)
    epoch = record["epoch"]
    return (
        f"On {machine(record)}: **{epoch['val_accuracy']:.2%}** accuracy on the validation digits after one epoch of "
        f"{epoch['seconds']:.0f} s, {epoch['samples_per_second']:,.0f} samples/s."
    )


def ladder() -> str:
    """Render the throughputs of the data ladder and their verdicts."""
    rungs = load("ladder")["rungs"]
    kinds = ("IO", "SYNTHETIC", "FULL")
    gpu = on_gpu("ladder")
    columns, sources = [rungs], [source(load("ladder"))]
    verdicts = [f"- `{name}`: {rung['verdict']}" for name, rung in rungs.items()]
    if gpu:
        columns.append(gpu["rungs"])
        sources.append(source(gpu))
        verdicts += [f"- `{name}`, on the GPU: {rung['verdict']}" for name, rung in gpu["rungs"].items()]

    def cells(rung: dict[str, Any] | None) -> list[str]:
        return [f"{rung[kind]['mean']:,.0f} ± {rung[kind]['std']:,.0f}" if rung else "" for kind in kinds]

    rows = [(f"`{name}`", *(cell for found in columns for cell in cells(found.get(name)))) for name in rungs]
    header = ["`--loader`", *kinds, *(f"{kind} on the GPU" for kind in kinds if gpu)]
    memory = rungs["memory"]
    gain = (
        f"`memory` loads {memory['IO']['mean'] / rungs['map']['IO']['mean']:.0f} times as fast as `map` with one "
        f"worker, and trains at {memory['FULL']['mean'] / memory['SYNTHETIC']['mean']:.0%} of its SYNTHETIC speed."
    )
    unit = "In samples/s, mean ± standard deviation of three trials."
    if gpu and "num_workers" in gpu:  # older records are silent on that
        unit += f" On the GPU, {workers_of(gpu)}."
    return "\n".join([table(header, rows), "", unit, *sources, "", *verdicts, "", gain])


def workers_of(record: dict[str, Any]) -> str:
    """Say how many workers the loaders had."""
    return f"the loaders that use workers have {record['num_workers']} of them"


def mnist_on_gpu() -> str:
    """Render what an epoch on MNIST takes on a GPU, and how fast each loader is there."""
    parts = []
    if record := on_gpu("mnist_epochs"):
        rows = [
            (
                name,
                f"{run['epochs'][0]['seconds']:.2f}",
                ", ".join(f"{epoch['seconds']:.2f}" for epoch in run["epochs"][1:]),
                f"{run['epochs'][-1]['samples_per_second']:,.0f}",
                f"{run['epochs'][-1]['val_accuracy']:.2%}",
            )
            for name, run in record["rows"].items()
        ]
        header = ["", "first epoch, s", "later epochs, s", "samples/s of the last", "its accuracy"]
        parts.append("\n".join([table(header, rows), "", source(record)]))
    if record := on_gpu("mnist_ladder"):
        kinds = ("IO", "SYNTHETIC", "FULL")
        rows = [
            (f"`{name}`", *(f"{rates[kind]['mean']:,.0f} ± {rates[kind]['std']:,.0f}" for kind in kinds))
            for name, rates in record["rungs"].items()
        ]
        unit = f"MNIST, in samples/s, mean ± standard deviation of three trials; {workers_of(record)}."
        parts.append("\n".join([table(["`--loader`", *kinds], rows), "", unit, source(record)]))
    return "\n\n".join(parts) or not_measured("gpu")


def line_profiles() -> str:
    """Render the lines of lesson 01 that take most time on a GPU, without workers and with many."""
    record = on_gpu("line_profiles")
    if not record:
        return not_measured("gpu")
    rows = []
    for name, profile in record["rows"].items():
        lines = sorted(profile["lines"], key=lambda line: -line["percent"])[:4]
        rows += [(name, f"`{line['text'].strip()[:60]}`", f"{line['percent']:.1f}") for line in lines]
    return "\n".join([table(["", "line", "% of the time"], rows), "", source(record)])


@also_on_gpu("fast")
def fast(machine: str | None = None) -> str:
    """Render the seconds to 98 % accuracy of the baseline and of the fast configuration."""
    record = load("fast", machine)
    if not record:
        return not_measured("fast")
    names = {
        "baseline": "01: `mnist.yaml`",
        "fewer": "01: and `--limit_train 40000`",
        "fast": "04: `mnist.yaml`, then `mnist_fast.yaml`",
        "fast_fp32": "04: `mnist.yaml`, then `mnist_fast.yaml`, `--precision fp32`",
        "fast_graph": "04: `mnist.yaml`, then `mnist_fast.yaml`, `--cuda_graph true`",
    }
    rows = [
        (
            names[key],
            f"{statistics.median(run['samples_per_second'] for run in runs):,.0f}",
            ", ".join(f"{run['seconds']:.1f}" for run in runs),
            f"{min(run['val_accuracy'] for run in runs):.2%}",
            f"{record['speedup'][key]:.1f}x",
        )
        for key, runs in record["runs"].items()
    ]
    target = f"training seconds to {record['target']:.0%}"
    header = ["lesson and `--config`", "samples/s", target, "lowest accuracy", "gain"]
    imitated = record.get("imitated_bf16_samples_per_second")
    note = f" With bf16, imitated, `mnist_fast.yaml` trains at {imitated:,.0f} samples/s." if imitated else ""
    first = {key: [run.get("first_step_seconds") for run in runs] for key, runs in record["runs"].items()}
    if all(seconds for found in first.values() for seconds in found):
        firsts = ", ".join(f"{statistics.median(found):.1f}" for found in first.values())
        note += f" Of these seconds the first step, in which libraries and kernels are loaded, took {firsts}."
    runs = {1: "One run", 2: "Two runs", 3: "Three runs"}[len(record["runs"]["baseline"])]
    how = f"{runs} each, taken in turn; gain by the medians.{note}"
    return "\n".join([table(header, rows), "", how, source(record)])


def faults() -> str:
    """Render how often each fault of the campaigns was handled, over all seeds that were run."""
    record = load("faults", f"{MACHINE}_faults")
    if not record:
        return "*Not measured yet: `make test-faults`.*"
    sums = {}
    for row in (row for rows in record["seeds"].values() for row in rows):
        before = sums.get(row["fault"], (0, 0, 0))
        sums[row["fault"]] = tuple(a + row[key] for a, key in zip(before, ("times", "handled", "lost"), strict=True))
    rows = [(fault, *map(str, counts)) for fault, counts in sums.items()]
    seeds = f"Seed(s) {', '.join(record['seeds'])}."
    return "\n".join([table(["fault", "times", "handled", "lost"], rows), "", seeds, source(record)])


def success_rate() -> str:
    """Render how many seeds reached the target, and what whole processes took."""
    record = load("success_rate")
    names = {
        "standard": "01: `mnist.yaml`",
        "fast": "04: `mnist_fast.yaml`",
        "dropout": "`--dropout true`",
        "fp32": "`--precision fp32`",
    }
    medians = {row["name"]: statistics.median(run["process_seconds"] for run in row["runs"]) for row in record["rows"]}
    rows = []
    for row in record["rows"]:
        accuracies = [run["val_accuracy"] for run in row["runs"]]
        reached = sum(accuracy >= record["target"] for accuracy in accuracies)
        seconds = medians[row["name"]]
        gain = f"{medians['standard'] / seconds:.1f}x"
        rows.append(
            (names[row["name"]], f"{reached}/{len(accuracies)}", f"{min(accuracies):.2%}", f"{seconds:.1f}", gain)
        )
    how = "Whole processes, taken in turn; medians."
    if record["cpu_share"] < 0.9:
        how += f" Other work left them {record['cpu_share']:.0%} of the CPUs."
    header = ["", f"seeds at {record['target']:.0%}", "lowest", "seconds", "gain"]
    return "\n".join([table(header, rows), "", how, source(record)])


def bandwidth() -> str:
    """Render this machine's row of the bandwidth table."""
    record, gpu = load("bandwidth"), on_gpu("bandwidth")
    measured = [found for found in (record, gpu) if found]
    paths = {row["path"]: row["counted"] for found in measured for row in found["rows"] if row.get("gb_per_second")}
    paths = {row["path"]: row["counted"] for row in record["rows"]} | paths

    def cells(found: dict[str, Any], path: str) -> tuple[str, str]:
        row = next((row for row in found["rows"] if row["path"] == path and row.get("gb_per_second")), None)
        return (f"{row['gb_per_second']:,.2f}", f"{row['hours_per_petabyte']:,.0f}") if row else ("not measured", "")

    rows = [(path, counted, *(cell for f in measured for cell in cells(f, path))) for path, counted in paths.items()]
    header = ["path", "bytes counted", "GB/s", "hours per PB"]
    header += ["GB/s, GPU machine", "hours per PB"] if gpu else []
    return "\n".join([table(header, rows), "", *map(source, measured)])


def sequential_reads() -> str:
    """Render what shards gain over single files on this machine's disk."""
    record = load("sequential_reads")
    rows = [(row["read"], f"{row['files']:,}", f"{row['samples'] / row['seconds']:,.0f}") for row in record["rows"]]
    gain = f"The shards give the same samples {record['ratio']:.0f} times as fast."
    return "\n".join([table(["read", "files", "samples/s"], rows), "", gain, source(record)])


@also_on_gpu("cpu_or_gpu")
def cpu_or_gpu(machine: str | None = None) -> str:
    """Render the plot of cpu_or_gpu.py and the conclusions drawn from its figures."""
    record = load("cpu_or_gpu", machine)
    conclusions = [f"- **{name}**: {text}" for name, text in record["conclusions"].items()]
    plot = picture("cpu_or_gpu", "Time by size, one line per library and number of threads", machine)
    return "\n".join([plot, "", *conclusions, "", source(record)])


def rooms() -> str:
    """Render the map of the package, from its docstring."""
    package = Path(__file__).parent.parent / "workshop" / "__init__.py"
    lines = [line.split(maxsplit=1) for line in package.read_text().split('"""')[1].splitlines()[2:]]
    return "\n".join(f"- `{room}`: {holds}" for room, holds in lines)


def hunks(lesson: str, base: str = "01_single_gpu") -> list[str]:
    """Return what differs between the scripts of two lessons, without the docstrings at their heads."""
    first, other = (
        (Path(__file__).parent.parent / name / "train.py").read_text().split('"""', 2)[2].splitlines()
        for name in (base, lesson)
    )
    found = []
    for line in list(difflib.unified_diff(first, other, lineterm="", n=1))[2:]:
        if line.startswith("@@"):
            found.append([])
        else:
            found[-1].append(line)
    return ["\n".join(["```diff", *hunk, "```"]) for hunk in found]


def hunk(lesson: str, text: str, base: str = "01_single_gpu") -> str:
    """Return those hunks of the difference that hold ``text``."""
    chosen = [hunk for hunk in hunks(lesson, base) if text in hunk]
    if not chosen:
        raise ValueError(f"no hunk of {lesson} holds {text!r}")
    return "\n\n".join(chosen)


def workers() -> str:
    """Render the throughput of lesson 01 by the number of worker processes."""
    record = load("workers")
    rows = record["rows"]
    first = rows[0]["samples_per_second"]
    cells = [
        (str(r["num_workers"]), f"{r['samples_per_second']:,.0f}", f"{r['samples_per_second'] / first:.2f}x")
        for r in rows
    ]
    return "\n".join([table(["`--num_workers`", "samples/s", "against 0"], cells), "", source(record)])


def convergence() -> str:
    """Render the plot of the convergence study, its runs side by side, and what follows from them."""
    record = load("convergence")
    first, *others = record["studies"]
    rows = []
    for number, curve in enumerate(first["curves"]):
        epoch = curve["epoch_at_target"]
        there = (f"{curve['steps'][epoch - 1]:,}", f"{curve['seconds'][epoch - 1]:.1f}") if epoch else ("never", "")
        seeds = (study["curves"][number]["val_loss"][-1] for study in others)
        rows.append(
            (
                f"`{curve['name']}`",
                f"{curve['peak_lr']:.2g}",
                str(curve["epochs"]),
                f"{curve['steps'][-1]:,}",
                f"**{curve['val_loss'][-1]:.3f}**",
                ", ".join(f"{loss:.3f}" for loss in seeds),
                f"{curve['seconds'][-1]:.1f}",
                *there,
            )
        )
    header = ["overlay", "peak lr", "epochs", "steps", "final loss", "with other seeds", "seconds"]
    plot = picture("convergence", "Validation loss by epoch, by seconds and by step")
    cells = table([*header, f"steps to {first['target_val_loss']:.3f}", "seconds to it"], rows)
    conclusions = [f"- {text}." for text in first["conclusions"]]
    return "\n".join([plot, "", cells, "", source(record), "", *conclusions])


def large_batches(record: dict[str, Any]) -> str:
    """Say with how many seeds the naive batch ends higher than the small one, and with how many each remedy helps."""
    overlays = ("cifar10_b64", "cifar10_b512_naive", "cifar10_b512_sqrt", "cifar10_b512_sqrt_long")
    ends = [[curve["val_loss"][-1] for curve in record["curves"][name]] for name in overlays]
    finals = list(zip(*ends, strict=True))
    worse = sum(naive > small for small, naive, _, _ in finals)
    helped = sum(scaled < naive for _, naive, scaled, _ in finals)
    mended = sum(both <= small for small, _, _, both in finals)
    return (
        f"The naive large batch ends higher than the small one with {worse} of {len(finals)} seeds. The larger rate "
        f"alone gets lower than the naive run with {helped} of {len(finals)}. With the longer schedule too, it gets "
        f"as low as the small batch, or lower, with {mended} of {len(finals)}."
    )

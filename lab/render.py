"""Turn measured figures and differences between scripts into parts of the READMEs; cog calls this (`make docs`)."""

import ast
import difflib
import functools
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workshop.paths import REPOSITORY

RESULTS = REPOSITORY / "results"
MACHINE = "amd_epyc_avx512_2cpu"
"""the machine whose figures the pages show, a CPU with bf16 instructions"""
WITHOUT_BF16 = "amd_epyc_avx2_2cpu"
"""another machine, without them"""
SHARDING = (
    "same_losses",
    "save_and_reshard",
    "limited_memory",
    "one_step",
    "accumulation",
    "recompute",
    "small_updates",
    "meta_device",
    "step_timeline",
)
"""the experiments of lesson 05 on two CPU ranks"""
ELSEWHERE = dict.fromkeys(
    ("fast", "first_changes", "slow_files", "loading_timelines", "emulated_gpu", "emulated_scaling", *SHARDING),
    WITHOUT_BF16,
)
"""the machine of these experiments, where it is not the first"""
BY_MANY = ("compare", "scaling", "allreduce", "unet3d_scaling")
"""what is best shown of a machine with many GPUs; all else of one GPU"""


def machine_of(experiment: str) -> str:
    """Return the name of the machine whose figures of an experiment the pages show."""
    return ELSEWHERE.get(experiment, MACHINE)


def load(experiment: str, machine: str | None = None) -> dict[str, Any]:
    """Return the results of an experiment, on ``machine`` or the one the pages show; empty if not measured there."""
    file = RESULTS / f"{machine or machine_of(experiment)}.json"
    measured = json.loads(file.read_text()) if file.exists() else {}
    return with_present_names(measured.get(experiment) or measured.get(FORMER_EXPERIMENTS.get(experiment, ""), {}))


FORMER_EXPERIMENTS = {
    "loaders": "ladder",
    "mnist_loaders": "mnist_ladder",
}
"""experiments that have another name in older results files, which are never edited"""
PRESENT_EXPERIMENTS = {former: present for present, former in FORMER_EXPERIMENTS.items()}
FORMER_NAMES = {
    "verdict": "diagnosis",
    "verdicts": "diagnoses",
    "rungs": "loaders",
    "machine_ceiling": "machine_bound",
    "matrix_ceiling": "matrix_bound",
    "against_ceiling": "share_of_bound",
    "waiting": "waiting_for_ranks",
    "imitated_bf16_samples_per_second": "emulated_bf16_samples_per_second",
}
"""keys of older results files, and what they are called now"""


def with_present_names(figures: Any) -> Any:  # noqa: ANN401, a JSON value
    """Return figures with the keys that they have in results of today."""
    if isinstance(figures, dict):
        return {FORMER_NAMES.get(key, key): with_present_names(value) for key, value in figures.items()}
    return [with_present_names(value) for value in figures] if isinstance(figures, list) else figures


def load_whole(experiment: str, machine: str) -> dict[str, Any] | None:
    """Return the results of an experiment on the GPUs of ``machine``; None if they are missing or incomplete."""
    results = load(experiment, machine)
    whole = results and not results.get("unfinished") and results["hardware"]["device"] == "cuda"
    return results if whole else None


def gpu_machine(experiment: str) -> str | None:
    """Return the name of a machine that has complete results of an experiment on its GPUs; None if none has."""
    found = []
    for file in RESULTS.glob("*gpu.json"):
        if results := load_whole(experiment, file.stem):
            found.append((results["hardware"]["gpus"], file.stem))
    return sorted(found, reverse=experiment in BY_MANY)[0][1] if found else None


def on_gpu(experiment: str) -> dict[str, Any] | None:
    """Return the results of an experiment on a GPU; None if there is none."""
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


def figure(experiment: str, what: str, machine: str | None = None) -> str:
    """Return the plot of an experiment, for a lesson's page; ``what`` says what it shows."""
    return f"![{what}](../results/{machine or machine_of(experiment)}_{experiment}.png)"


def not_measured(experiment: str) -> str:
    """Say that the results are missing, and how to measure them."""
    return f"*Not measured yet: `python lab/measure.py {experiment}`.*"


def machine(results: dict[str, Any]) -> str:
    """Say where and with what the results were measured."""
    hardware, versions = results["hardware"], results["versions"]
    instructions = hardware.get("cpu_instructions")  # missing in older results files
    cpus = f"{hardware['cpus_available']} CPUs of an {hardware['cpu']}{f' ({instructions})' if instructions else ''}"
    where = hardware.get("device_name") or cpus
    return f"{where}, torch {versions['torch']}, Python {versions['python']}, {results['date']}"


def source(results: dict[str, Any]) -> str:
    """Return the caption under a table: where it was measured and the command that measures it again."""
    command = results["command"].replace("results/measure.py", "lab/measure.py")  # where the file was before
    command = re.sub(r"(?<=measure\.py )\w+$", lambda name: PRESENT_EXPERIMENTS.get(name[0], name[0]), command)
    return f"*Measured on {machine(results)}, with `{command}`.*"


NUMBER = re.compile(r"[^\w`]*\d(?!.*[a-z]{3}.* [a-z]{2})|none$|-?$")
"""the beginning of a cell of a table that holds a number, perhaps with a unit; none, - and nothing stand for one"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns of numbers but the first are aligned to the right."""
    columns = [cells for _, *cells in zip(header, *rows, strict=True)]
    numbers = [sum(bool(NUMBER.match(cell)) for cell in cells) > len(cells) / 2 for cells in columns[1:]]
    lines = [header, ["---", *("---:" if of_numbers else "---" for of_numbers in numbers)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean_std(throughput: dict[str, Any]) -> str:
    """Return samples/s with their standard deviation."""
    return f"{throughput['mean']:,.0f} ± {throughput['std']:,.0f}"


@also_on_gpu("baseline")
def line_profile(machine: str | None = None) -> str:
    """Render the line profile of lesson 01's baseline: the lines that took at least 0.1 % of the time."""
    results = load("baseline", machine)
    lines = [f"{'Line':>4} {'Hits':>6} {'Seconds':>8} {'% Time':>7}  Line contents"]
    for line in results["lines"]:
        if line["percent"] >= 0.1:
            figures = f"{line['line']:>4} {line['hits']:>6} {line['seconds']:>8.2f} {line['percent']:>7.1f}"
            lines.append(f"{figures}  {line['text']}")
    return "\n".join(["```text", *lines, "```", "", source(results)])


@also_on_gpu("baseline")
def baseline_epoch(name: str | None = None) -> str:
    """Render one sentence on the accuracy after one epoch of lesson 01."""
    results = load("baseline", name)
    return (
        f"**{results['epoch']['val_accuracy']:.2%}** of the validation digits are classified correctly "
        "after one epoch (one run).\n"
        f"{source(results)}"
    )


def loaders() -> str:
    """Render the throughput of CIFAR-10 with each loader, and the diagnoses."""
    by_loader = load("loaders")["loaders"]
    kinds = ("IO", "SYNTHETIC", "FULL")
    gpu = on_gpu("loaders")
    columns, sources = [by_loader], [source(load("loaders"))]
    diagnoses = [f"- `{name}`: {found['diagnosis']}" for name, found in by_loader.items()]
    if gpu:
        columns.append(gpu["loaders"])
        sources.append(source(gpu))
        diagnoses += [f"- `{name}`, on the GPU: {found['diagnosis']}" for name, found in gpu["loaders"].items()]

    def cells(found: dict[str, Any] | None) -> list[str]:
        return [mean_std(found[kind]) if found else "" for kind in kinds]

    rows = [(f"`{name}`", *(cell for found in columns for cell in cells(found.get(name)))) for name in by_loader]
    header = ["`--loader`", *kinds, *(f"{kind} on the GPU" for kind in kinds if gpu)]
    memory = by_loader["memory"]
    gain = (
        f"`memory` loads {memory['IO']['mean'] / by_loader['map']['IO']['mean']:.0f} times as fast as `map` with one "
        f"worker, and trains at {memory['FULL']['mean'] / memory['SYNTHETIC']['mean']:.0%} of its SYNTHETIC speed."
    )
    unit = "In samples/s, mean ± standard deviation of three trials."
    if gpu and "num_workers" in gpu:  # missing in older results files
        unit += f" On the GPU, {workers_of(gpu)}."
    return "\n".join([table(header, rows), "", unit, *sources, "", *diagnoses, "", gain])


def workers_of(results: dict[str, Any]) -> str:
    """Say how many workers the loaders had."""
    return f"the loaders that use workers have {results['num_workers']} of them"


def mnist_on_gpu() -> str:
    """Render what an epoch on MNIST takes on a GPU, and how fast each loader is there."""
    parts = []
    if results := on_gpu("mnist_epochs"):
        rows = [
            (
                name,
                f"{run['epochs'][0]['seconds']:.2f}",
                ", ".join(f"{epoch['seconds']:.2f}" for epoch in run["epochs"][1:]),
                f"{run['epochs'][-1]['samples_per_second']:,.0f}",
                f"{run['epochs'][-1]['val_accuracy']:.2%}",
            )
            for name, run in results["rows"].items()
        ]
        header = ["", "first epoch, s", "later epochs, s", "samples/s of the last", "its accuracy"]
        parts.append("\n".join([table(header, rows), "", source(results)]))
    if results := on_gpu("mnist_loaders"):
        kinds = ("IO", "SYNTHETIC", "FULL")
        rates_of = results["loaders"].items()
        by_loader = [(f"`{name}`", *(mean_std(rates[kind]) for kind in kinds)) for name, rates in rates_of]
        unit = f"MNIST, in samples/s, mean ± standard deviation of three trials; {workers_of(results)}."
        parts.append("\n".join([table(["`--loader`", *kinds], by_loader), "", unit, source(results)]))
    return "\n\n".join(parts) or not_measured("gpu")


def line_profiles() -> str:
    """Render the lines of lesson 01 that take most time on a GPU, without workers and with many."""
    results = on_gpu("line_profiles")
    if not results:
        return not_measured("gpu")
    rows = []
    for name, profile in results["rows"].items():
        lines = sorted(profile["lines"], key=lambda line: -line["percent"])[:4]
        rows += [(name, f"`{line['text'].strip()[:60]}`", f"{line['percent']:.1f}") for line in lines]
    return "\n".join([table(["", "line", "% of the time"], rows), "", source(results)])


@also_on_gpu("fast")
def fast(machine: str | None = None) -> str:
    """Render the seconds to 98 % accuracy of the baseline and of the fast configuration."""
    results = load("fast", machine)
    if not results:
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
            f"{results['speedup'][key]:.1f}x",
        )
        for key, runs in results["runs"].items()
    ]
    target = f"training seconds to {results['target']:.0%}"
    header = ["lesson and `--config`", "samples/s", target, "lowest accuracy", "gain"]
    emulated = results.get("emulated_bf16_samples_per_second")
    note = f" With emulated bf16, `mnist_fast.yaml` trains at {emulated:,.0f} samples/s." if emulated else ""
    first = {key: [run.get("first_step_seconds") for run in runs] for key, runs in results["runs"].items()}
    if all(seconds for found in first.values() for seconds in found):
        firsts = ", ".join(f"{statistics.median(found):.1f}" for found in first.values())
        note += f" Of these seconds the first step, in which libraries and kernels are loaded, took {firsts}."
    runs = {1: "One run", 2: "Two runs", 3: "Three runs"}[len(results["runs"]["baseline"])]
    how = f"{runs} each, measured alternately; gain by the medians.{note}"
    return "\n".join([table(header, rows), "", how, source(results)])


def faults() -> str:
    """Render how often each fault of the campaigns was handled, over all seeds that were run."""
    results = load("faults", f"{MACHINE}_faults")
    if not results:
        return "*Not measured yet: `make test-faults`.*"
    sums: dict[str, tuple[int, int, int]] = {}
    for row in (row for rows in results["seeds"].values() for row in rows):
        before = sums.get(row["fault"], (0, 0, 0))
        sums[row["fault"]] = tuple(a + row[key] for a, key in zip(before, ("times", "handled", "lost"), strict=True))
    rows = [(fault, *map(str, counts)) for fault, counts in sums.items()]
    seeds = f"Seed(s) {', '.join(results['seeds'])}."
    return "\n".join([table(["fault", "times", "handled", "lost"], rows), "", seeds, source(results)])


def success_rate() -> str:
    """Render how many seeds reached the target, and what whole processes took."""
    results = load("success_rate")
    names = {
        "standard": "01: `mnist.yaml`",
        "fast": "04: `mnist_fast.yaml`",
        "dropout": "`--dropout true`",
        "fp32": "`--precision fp32`",
    }
    medians = {row["name"]: statistics.median(run["process_seconds"] for run in row["runs"]) for row in results["rows"]}
    rows = []
    for row in results["rows"]:
        accuracies = [run["val_accuracy"] for run in row["runs"]]
        reached = sum(accuracy >= results["target"] for accuracy in accuracies)
        seconds = medians[row["name"]]
        gain = f"{medians['standard'] / seconds:.1f}x"
        rows.append(
            (names[row["name"]], f"{reached}/{len(accuracies)}", f"{min(accuracies):.2%}", f"{seconds:.1f}", gain)
        )
    how = "Whole processes, measured alternately; medians."
    if results["cpu_share"] < 0.9:
        how += f" Other work left them {results['cpu_share']:.0%} of the CPUs."
    header = ["", f"seeds at {results['target']:.0%}", "lowest", "seconds", "gain"]
    return "\n".join([table(header, rows), "", how, source(results)])


def success_rate_spread() -> str:
    """Say how much the runs of `success_rate` differ from seed to seed."""
    rows = {row["name"]: row["runs"] for row in load("success_rate")["rows"]}
    seconds = {name: sorted(run["process_seconds"] for run in runs) for name, runs in rows.items()}
    accuracies = {name: sorted(run["val_accuracy"] for run in runs) for name, runs in rows.items()}
    fast, dropout = seconds["fast"], seconds["dropout"]
    said = (
        f"How large is the noise? The {len(fast)} runs with `mnist_fast.yaml` take {fast[0]:.1f} to {fast[-1]:.1f} s, "
        f"and their accuracies are from {accuracies['fast'][0]:.2%} to {accuracies['fast'][-1]:.2%}. The runs with "
        f"dropout take {', '.join(f'{value:.1f}' for value in dropout)} s and end at {accuracies['dropout'][0]:.2%} to "
        f"{accuracies['dropout'][-1]:.2%}"
    )
    if dropout[0] > fast[-1] and accuracies["dropout"][-1] < accuracies["fast"][0]:
        return f"{said}: each of them is slower and ends lower than each of the others."
    return f"{said}. These ranges overlap, so the difference may be noise."


def bandwidth() -> str:
    """Render this machine's row of the bandwidth table."""
    results, gpu = load("bandwidth"), on_gpu("bandwidth")
    measured = [found for found in (results, gpu) if found]
    paths = {row["path"]: row["counted"] for found in measured for row in found["rows"] if row.get("gb_per_second")}
    paths = {row["path"]: row["counted"] for row in results["rows"]} | paths

    def cells(found: dict[str, Any], path: str) -> tuple[str, str]:
        row = next((row for row in found["rows"] if row["path"] == path and row.get("gb_per_second")), None)
        return (f"{row['gb_per_second']:,.2f}", f"{row['hours_per_petabyte']:,.0f}") if row else ("not measured", "")

    rows = [(path, counted, *(cell for f in measured for cell in cells(f, path))) for path, counted in paths.items()]
    header = ["path", "bytes counted", "GB/s", "hours per PB"]
    header += ["GB/s, GPU machine", "hours per PB"] if gpu else []
    return "\n".join([table(header, rows), "", "Each path was measured once.", *map(source, measured)])


def sequential_reads() -> str:
    """Render what shards gain over single files on this machine's disk."""
    results = load("sequential_reads")
    rows = [(row["read"], f"{row['files']:,}", f"{row['samples'] / row['seconds']:,.0f}") for row in results["rows"]]
    gain = f"The shards give the same samples {results['ratio']:.0f} times as fast."
    return "\n".join([table(["read", "files", "samples/s"], rows), "", gain, source(results)])


CLEARLY = 0.9
"""one is clearly faster than another if it needs less than this share of its time, as in the experiment itself"""


def half_range(row: dict[str, Any]) -> float:
    """Return half of the interquartile range of the repeats, in seconds."""
    return row["spread"] / 2


def clearly_faster(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say whether one time is clearly shorter than another, also beyond the spread of both."""
    apart = one["seconds"] + half_range(one) < other["seconds"] - half_range(other)
    return one["seconds"] < CLEARLY * other["seconds"] and apart


def short_time(seconds: float) -> str:
    """Return a time with two digits and its unit."""
    factor, unit = next(one for one in ((1e6, "µs"), (1e3, "ms"), (1, "s")) if seconds * one[0] < 1000 or one[0] == 1)
    return f"{seconds * factor:.2g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"


def label_of(row: dict[str, Any]) -> str:
    """Return the name of what a row of cpu_or_gpu.py was measured with."""
    threads = {None: "", 1: ", 1 thread"}.get(row["threads"], f", {row['threads']} threads")
    return f"{row['backend']}{threads}{', with the copy' if row['copied'] else ''}"


@also_on_gpu("cpu_or_gpu")
def cpu_or_gpu(machine: str | None = None) -> str:
    """Render who is fastest at the smallest and the largest size of each problem of cpu_or_gpu.py."""
    results = load("cpu_or_gpu", machine)
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        if row["seconds"]:
            problems.setdefault(row["sweep"] or row["experiment"], []).append(row)
    cells = []
    for name, rows in problems.items():
        sizes = sorted({row["size"] for row in rows})
        by_size = {size: sorted((r for r in rows if r["size"] == size), key=lambda r: r["seconds"]) for size in sizes}
        parallel = []
        for size in sizes:
            single = [r for r in by_size[size] if r["threads"] == 1 and r["device"] == "cpu"]
            if single and clearly_faster(by_size[size][0], single[0]):
                parallel.append(f"{size:,}")
        ends = []
        for size in (sizes[0], sizes[-1]):
            best = by_size[size][0]
            share = half_range(best) / best["seconds"]
            unit = best["unit"].removesuffix("s") if size == 1 else best["unit"]
            ends.append(f"{size:,} {unit}: {label_of(best)}, {short_time(best['seconds'])} ± {share:.0%}")
        cells.append((name, *ends, ", ".join(parallel) or "none"))
    header = ["problem", "fastest at the smallest size", "fastest at the largest size", "more than one thread pays at"]
    how = (
        "Each time is the median of three or more repeats ± half of their interquartile range, which is the range of "
        "the middle half of the repeats."
    )
    return "\n".join([table(header, cells), "", how, source(results)])


def package_map() -> str:
    """Render the map of the package, from its docstring."""
    package = REPOSITORY / "workshop" / "__init__.py"
    lines = [line.split(maxsplit=1) for line in package.read_text().split('"""')[1].splitlines()[2:]]
    return "\n".join(f"- `{module}`: {contents}" for module, contents in lines)


BUILDS_ON = {
    "02_dataparallel": "01_single_gpu",
    "03_ddp": "01_single_gpu",
    "04_mixed_precision": "03_ddp",
    "05_fully_sharded": "04_mixed_precision",
}
"""for each lesson, the lesson whose script it changes"""
RENAMED = {("03_ddp", "train"): "main", ("03_ddp", "main"): ""}
"""definitions that have another name in the script that a lesson builds on, or are new in spite of their name"""


def definitions(lesson: str) -> dict[str, list[str]]:
    """Return the lines of each definition at the top level of a lesson's script, by name; what precedes is "imports".

    Comments before a definition belong to it. The docstring of the script is left out.
    """
    return definitions_in(REPOSITORY / lesson / "train.py")


def definitions_in(script: Path) -> dict[str, list[str]]:
    """Do what `definitions` does, for any script."""
    text = script.read_text()
    lines = text.splitlines()
    nodes = ast.parse(text).body
    starts = {"imports": nodes[1].lineno}
    for node in nodes[1:]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts[node.name] = min(part.lineno for part in (node, *node.decorator_list))
        elif isinstance(node, ast.Assign):
            starts[ast.unparse(node.targets[0])] = node.lineno
        elif isinstance(node, ast.If):
            starts["entry"] = node.lineno
    ends = [*list(starts.values())[1:], len(lines) + 1]
    return {
        name: "\n".join(lines[start - 1 : end - 1]).rstrip().splitlines()
        for (name, start), end in zip(starts.items(), ends, strict=True)
    }


def changed(lesson: str) -> dict[str, list[str]]:
    """Return what differs from the script that a lesson builds on: the hunks of each definition, by its name.

    A new definition is one hunk, in Python; the others are differences, with a line before and after.
    """
    former_names = {name: former for (of, name), former in RENAMED.items() if of == lesson}
    return differences(definitions(BUILDS_ON[lesson]), definitions(lesson), former_names)


def differences(
    before: dict[str, list[str]], after: dict[str, list[str]], former_names: dict[str, str]
) -> dict[str, list[str]]:
    """Return the hunks of each definition that is new or differs, by its name in ``after``."""
    found = {}
    for name, lines in after.items():
        old = before.get(former_names.get(name, name))
        if old is None:
            found[name] = ["\n".join(["```python", *lines, "```"])]
        elif old != lines:
            hunks: list[list[str]] = []
            for line in list(difflib.unified_diff(old, lines, lineterm="", n=1))[2:]:
                if line.startswith("@@"):
                    hunks.append([])
                else:
                    hunks[-1].append(line)
            found[name] = ["\n".join(["```diff", *hunk, "```"]) for hunk in hunks]
    return found


def change(lesson: str, name: str, text: str = "") -> str:
    """Return the hunks of one definition of a lesson's script that contain ``text``, by default all of them."""
    chosen = [hunk for hunk in changed(lesson).get(name, []) if text in hunk]
    if not chosen:
        raise ValueError(f"{lesson}: nothing that changed in {name} contains {text!r}")
    return "\n\n".join(chosen)


def large_batches(results: dict[str, Any]) -> str:
    """Say with how many seeds the naive batch ends higher than the small one, and with how many each change helps."""
    overlays = ("cifar10_b64", "cifar10_b512_naive", "cifar10_b512_sqrt", "cifar10_b512_sqrt_long")
    ends = [[curve["val_loss"][-1] for curve in results["curves"][name]] for name in overlays]
    finals = list(zip(*ends, strict=True))
    worse = sum(naive > small for small, naive, _, _ in finals)
    helped = sum(scaled < naive for _, naive, scaled, _ in finals)
    fixed = sum(both <= small for small, _, _, both in finals)
    return (
        f"The naive large batch ends higher than the small one with {worse} of {len(finals)} seeds. The higher "
        f"learning rate alone ends lower than the naive run with {helped} of {len(finals)}. Together with the longer "
        f"schedule, it ends as low as the small batch, or lower, with {fixed} of {len(finals)}."
    )

"""Turn figures on record and differences between scripts into parts of the READMEs; cog calls this (`make docs`)."""

import difflib
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MACHINE = "amd_epyc_2cpu"
"""the machine whose figures the pages show where they need one that everybody can compare with"""


def load(experiment: str, machine: str = MACHINE) -> dict[str, Any] | None:
    """Return the record of an experiment on a machine, or None if it was not measured there."""
    file = Path(__file__).parent / f"{machine}.json"
    return json.loads(file.read_text()).get(experiment) if file.exists() else None


def machine(record: dict[str, Any]) -> str:
    """Say where and with what a record was measured."""
    hardware, versions = record["hardware"], record["versions"]
    where = hardware.get("device_name") or f"{hardware['cpus_available']} CPUs of an {hardware['cpu']}"
    return f"{where}, torch {versions['torch']}, Python {versions['python']}, {record['date']}"


def source(record: dict[str, Any]) -> str:
    """Return the caption under a table: where it was measured and the command that measures it again."""
    return f"*Measured on {machine(record)}, with `{record['command']}`.*"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, all columns but the first aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def line_profile() -> str:
    """Render the line profile of lesson 01's baseline: the lines that took at least 0.1 % of the time."""
    record = load("baseline")
    lines = [f"{'Line':>4} {'Hits':>6} {'Seconds':>8} {'% Time':>7}  Line contents"]
    for line in record["lines"]:
        if line["percent"] >= 0.1:
            figures = f"{line['line']:>4} {line['hits']:>6} {line['seconds']:>8.2f} {line['percent']:>7.1f}"
            lines.append(f"{figures}  {line['text']}")
    return "\n".join(["```text", *lines, "```", "", source(record)])


def baseline_epoch() -> str:
    """Render one sentence on what one epoch of lesson 01 gives and costs."""
    record = load("baseline")
    epoch = record["epoch"]
    return (
        f"On {machine(record)}: **{epoch['val_accuracy']:.2%}** accuracy on the validation digits after one epoch of "
        f"{epoch['seconds']:.0f} s, {epoch['samples_per_second']:,.0f} samples/s."
    )


def ladder() -> str:
    """Render the throughputs of the data ladder and their verdicts."""
    rungs = load("ladder")["rungs"]
    kinds = ("IO", "SYNTHETIC", "FULL")
    rows = [
        (f"`{name}`", *(f"{rung[kind]['mean']:,.0f} ± {rung[kind]['std']:,.0f}" for kind in kinds))
        for name, rung in rungs.items()
    ]
    verdicts = [f"- `{name}`: {rung['verdict']}" for name, rung in rungs.items()]
    memory = rungs["memory"]
    gain = (
        f"`memory` loads {memory['IO']['mean'] / rungs['map']['IO']['mean']:.0f} times as fast as `map` with one "
        f"worker, and trains at {memory['FULL']['mean'] / memory['SYNTHETIC']['mean']:.0%} of its SYNTHETIC speed."
    )
    unit = "In samples/s, mean ± standard deviation of three trials."
    return "\n".join([table(["`--loader`", *kinds], rows), "", unit, source(load("ladder")), "", *verdicts, "", gain])


def fast() -> str:
    """Render the seconds to 98 % accuracy of the baseline and of the fast configuration."""
    record = load("fast")
    names = {
        "baseline": "`mnist.yaml`",
        "fewer": "`mnist.yaml`, and `--limit_train 40000`",
        "fast": "`mnist.yaml`, then `mnist_fast.yaml`",
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
    header = ["`--config`", "samples/s", target, "lowest accuracy", "gain"]
    return "\n".join([table(header, rows), "", "Three runs each, taken in turn; gain by the medians.", source(record)])


def bandwidth() -> str:
    """Render this machine's row of the bandwidth table."""
    record = load("bandwidth")
    rows = []
    for row in record["rows"]:
        speed = row.get("gb_per_second")
        figures = (f"{speed:,.2f}", f"{row['hours_per_petabyte']:,.0f}") if speed else ("not measured", "")
        rows.append((row["path"], row["counted"], *figures))
    return "\n".join([table(["path", "bytes counted", "GB/s", "hours per PB"], rows), "", source(record)])


def sequential_reads() -> str:
    """Render what shards gain over single files on this machine's disk."""
    record = load("sequential_reads")
    rows = [(row["read"], f"{row['files']:,}", f"{row['samples'] / row['seconds']:,.0f}") for row in record["rows"]]
    gain = f"The shards give the same samples {record['ratio']:.0f} times as fast."
    return "\n".join([table(["read", "files", "samples/s"], rows), "", gain, source(record)])


def cpu_or_gpu() -> str:
    """Render the plot of cpu_or_gpu.py and the conclusions drawn from its figures."""
    record = load("cpu_or_gpu")
    conclusions = [f"- **{name}**: {text}" for name, text in record["conclusions"].items()]
    plot = f"![Time by size, one line per library and number of threads](../results/{MACHINE}_cpu_or_gpu.png)"
    return "\n".join([plot, "", *conclusions, "", source(record)])


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


def precision_ladder(machine: str = MACHINE) -> str:
    """Render what each option of lesson 04 costs and gives."""
    record = load("precision_ladder", machine)
    if not record:
        return "*Not measured yet.*"
    rows = [
        (
            f"{row['name']}",
            f"{row['samples_per_second']:,.0f} ± {row['samples_per_second_std']:,.0f}",
            f"{row['peak_memory_bytes'] / 1e6:,.0f}",
            f"{row['tflops']:.2g}",
            f"{row['share_of_peak']:.0%}",
            f"{row['output_error']:.0e}",
            f"{row['gradient_error']:.0e}",
            f"{row['val_loss']:.4f}",
        )
        for row in record["rows"]
        if not row["note"]
    ]
    header = ["", "samples/s", "peak MB", "TFLOP/s", "of peak", "error of outputs", "of gradients", "val loss"]
    missing = [f"- `{row['name']}`: {row['note']}" for row in record["rows"] if row["note"]]
    peaks = ", ".join(f"{name} {tflops:.2g}" for name, tflops in record["peaks"].items())
    workload = (
        f"`{record['config']['model']}` on `{record['config']['dataset']}`, batches of {record['batch_size']}, "
        f"{record['flops_per_sample'] / 1e9:.2g} GFLOP per sample; validation loss after {record['steps']} steps. "
        f"Peak of matrix products in TFLOP/s: {peaks}."
    )
    plot = f"![Speed, memory and error of each rung](../results/{machine}_precision_ladder.png)"
    return "\n".join([table(header, rows), "", workload, source(record), "", *missing, "", plot])


def underflow(machine: str = MACHINE) -> str:
    """Render what becomes of a model's gradients in 16 bits."""
    record = load("underflow", machine)
    if not record:
        return "*Not measured yet.*"
    rows = [
        (
            row["format"],
            f"2^{math.log2(row['scale']):.0f}",
            *(f"{row[name]:.1%}" for name in ("zero", "coarse", "overflow")),
        )
        for row in record["rows"]
    ]
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in record["val_losses"].items())
    plot = f"![Histogram of the gradients' powers of two](../results/{machine}_underflow.png)"
    header = ["format", "loss times", "become 0", "lose digits", "overflow"]
    trained = f"Validation loss after {record['steps']} steps: {losses}."
    return "\n".join([table(header, rows), "", trained, source(record), "", plot])


def tensor_cores(machine: str = MACHINE) -> str:
    """Render how the rate of matrix products depends on their sizes."""
    record = load("tensor_cores", machine)
    if not record:
        return "*Not measured yet.*"
    conclusions = [f"- {text}" for text in record["conclusions"].values()]
    plot = f"![Rate of matrix products by size](../results/{machine}_tensor_cores.png)"
    return "\n".join([*conclusions, "", plot, "", source(record)])


def unet3d(machine: str = MACHINE) -> str:
    """Render the losses of the tiny U-Net against that of a predictor without a network."""
    record = load("unet3d", machine)
    if not record:
        return "*Not measured yet.*"
    first = record["rows"][0]["val_loss"]
    rows = [
        (
            f"`{row['precision']}`",
            f"{row['val_loss']:.4f}",
            f"{row['val_loss'] / first - 1:+.1%}",
            f"{record['trivial_loss'] / row['val_loss']:.1f}x",
            f"{row['seconds']:.0f}",
        )
        for row in record["rows"]
    ]
    header = ["`--precision`", "val loss", "against fp32", "below the copy", "training seconds"]
    copying = f"A predictor that copies its input and knows no temperature has a loss of {record['trivial_loss']:.4f}."
    return "\n".join([table(header, rows), "", copying, source(record)])

"""Step-by-step comparison: what each option of train.py costs and gives, all measured on the same work.

    python experiments/ladder.py --quick true    # within a minute, on cubes of 8 cells: to see that it works
    python experiments/ladder.py                 # minutes; the 3D U-Net: a small one on a CPU, the full one on a GPU
    python experiments/ladder.py --config ../configs/cifar10.yaml --model resnet18 --batch_size 64

The first configurations are the number formats; each one with a + adds one option to the one above it. You should see
speed and memory change a lot and the validation loss by chance only, errors that follow from the number of bits, and at
least one option that costs more than it gives. Each configuration is measured in a process of its own, see
precision_ladder.py, by the step of train.py. ladder.json is written anew after each of them, so it can be read at any
time, and a run that is stopped loses only the configuration that it was measuring.
"""

import dataclasses
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from precision_ladder import NAMES, SHARED, compare, measure, prepare
from workload import WorkloadConfig, read_workload, training_device
from workshop.errors import UserError, run_reporting_user_errors
from workshop.measuring.flags import default_folder, make_output_folder
from workshop.measuring.launching import reason
from workshop.measuring.records import write_record
from workshop.measuring.tables import format_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class LadderConfig(WorkloadConfig):
    """The flags of the workload, as train.py has them, and of the measurement."""

    trials: int = 3
    """how often the throughput of each configuration is measured"""
    trial_seconds: float = 3.0
    """about how long each time"""
    configuration: str | None = None
    """measure this one alone, in this process, and write no table: 'shared' first, then for example '+ fused', both
    with the same --out"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trials < 2:
            raise UserError(f"--trials must be at least 2, got {self.trials}")
        if not self.trial_seconds > 0:
            raise UserError(f"--trial_seconds must be above 0, got {self.trial_seconds}")
        if self.configuration not in (None, SHARED, *NAMES):
            known = ", ".join(f"'{name}'" for name in (SHARED, *NAMES))
            raise UserError(f"--configuration must be one of {known}, got '{self.configuration}'")


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a person reads them."""
    header = ["", "samples/s", "±", "peak MB", "TFLOP/s", "of peak", "outputs", "gradients", "val loss"]
    lines = []
    for row in figures["rows"]:
        if row["note"]:
            continue
        cells = [
            f"{row['samples_per_second']:,.1f}",
            f"{row['samples_per_second_std']:,.1f}",
            f"{row['peak_memory_bytes'] / 1e6:,.1f}",
            f"{row['tflops']:.3g}",
            f"{row['share_of_peak']:.0%}",
            *("-" if error is None else f"{error:.0e}" for error in (row["output_error"], row["gradient_error"])),
            f"{row['val_loss']:.4f}",
        ]
        lines.append([row["name"], *cells])
    notes = [f"{row['name']}: {row['note']}" for row in figures["rows"] if row["note"]]
    notes += [text for text in (figures["reference"], repetition(figures)) if text]
    return "\n".join([format_table(header, lines), "", *notes])


def repetition(figures: dict[str, Any]) -> str:
    """Say how much the throughput of one configuration differed when it was measured again at the end, if it was."""
    again = figures.get("repeated")
    if not again:
        return ""
    first = next(row for row in figures["rows"] if row["name"] == again["name"])
    if again["note"] or first["note"]:
        return f"{again['name']} again at the end: {again['note'] or 'measured, but not before'}"
    change = again["samples_per_second"] / first["samples_per_second"] - 1
    return (
        f"{again['name']} again at the end: {again['samples_per_second']:,.1f} ± "
        f"{again['samples_per_second_std']:,.1f} samples/s ({change:+.0%}); smaller differences between two "
        "configurations may be those of the machine"
    )


def plot(figures: dict[str, Any], file: Path) -> None:
    """Draw what `compare` found into a PNG: a bar for each configuration, a panel for each quantity."""
    from matplotlib.figure import Figure  # not by the processes that only measure

    rows = [row for row in figures["rows"] if not row["note"]]
    names = [row["name"] for row in rows]
    figure = Figure(figsize=(12, 1.8 + 0.48 * len(rows)), layout="constrained")
    figure.suptitle(message(rows), fontsize=14, fontweight="bold")
    speed, memory, error, loss = figure.subplots(1, 4, sharey=True)

    speeds = [row["samples_per_second"] for row in rows]
    texts = [f"{row['samples_per_second']:,.0f}: {row['share_of_peak']:.0%} of peak" for row in rows]
    spread = {"xerr": [row["samples_per_second_std"] for row in rows], "ecolor": "dimgray"}
    speed.barh(names, speeds, color="tab:green", alpha=0.75, **spread)
    _label(speed, speeds, texts)
    speed.set_title("samples/s")

    megabytes = [row["peak_memory_bytes"] / 1e6 for row in rows]
    memory.barh(names, megabytes, color="tab:blue", alpha=0.75)
    _label(memory, megabytes, [f"{value:,.0f}" for value in megabytes])
    memory.set_title("peak memory in MB")

    outputs, gradients = (
        [float("nan") if row[key] is None else row[key] for row in rows] for key in ("output_error", "gradient_error")
    )
    error.plot(outputs, names, "o", color="tab:orange", label="outputs")
    error.plot(gradients, names, "s", color="tab:red", markerfacecolor="none", markersize=9, label="gradients")
    error.set(xscale="log", title="error against float64")
    error.grid(axis="x", alpha=0.3)
    error.legend(fontsize=10.5)

    losses = [row["val_loss"] for row in rows]
    loss.barh(names, losses, color="tab:gray", alpha=0.75)
    _label(loss, losses, [f"{value:.4f}" for value in losses])
    loss.set_title(f"loss after {figures['steps']} steps")
    speed.invert_yaxis()  # shared by all panels: the first configuration is at the top
    figure.savefig(file, dpi=110)


def message(rows: list[dict[str, Any]]) -> str:
    """Say what the gain is: that of the first configuration that no other beats by more than the spread of both."""
    first, best = rows[0], max(rows, key=lambda row: row["samples_per_second"])
    close = best["samples_per_second"] - best["samples_per_second_std"]
    named = next(row for row in rows if row["samples_per_second"] + row["samples_per_second_std"] >= close)
    if named is first:
        return f"No configuration is faster than {first['name']} by more than the spread"
    gain = named["samples_per_second"] / first["samples_per_second"]
    change = named["val_loss"] / first["val_loss"] - 1
    others = "" if named is best else "; what is added gains no more than the spread"
    return f"{named['name']}: {gain:.1f} times as fast as {first['name']}, validation loss {change:+.1%}{others}"


def _label(axes: "Axes", values: list[float], texts: list[str]) -> None:
    """Write each bar's text into it."""
    for place, text in enumerate(texts):
        axes.text(0.02 * max(values), place - 0.2, text, va="center", fontsize=10.5)  # above the line of the spread


def start(name: str, folder: Path) -> str:
    """Run this script for one configuration, with the same flags, in a process of its own.

    Args:
        name: of `NAMES`, or `SHARED`.
        folder: in which it leaves its files.

    Returns: why it failed, in one line; "" if it did not.
    """
    own = ["--out", str(folder), "--configuration", name]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *own], stderr=subprocess.PIPE, text=True
    )
    if not done.returncode:
        return ""
    print(done.stderr, end="", file=sys.stderr, flush=True)
    return reason(done.stderr) or f"exit status {done.returncode}"


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """End by an exception on SIGTERM, too: then the process that is measuring does not outlive this one."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Compare the configurations; print, save and plot what was found."""
    device = training_device()
    config = read_workload(LadderConfig, device, __doc__, steps=5, trial_seconds=0.05)
    folder = config.out or default_folder()
    make_output_folder(folder)
    if config.configuration == SHARED:
        return prepare(config, device, folder, compiled=not config.quick)
    if config.configuration:
        if not (folder / f"{SHARED}.json").exists():
            raise UserError(f"--configuration: {folder} lacks what all share; run --configuration {SHARED} first")
        name = config.configuration
        return measure(name, config, device, folder, config.steps, config.trials, config.trial_seconds)

    print(f"{config.model} on {config.dataset}, {config.batch_size} samples a step, on {device}", flush=True)
    json_file, plot_file = folder / "ladder.json", folder / "ladder.png"
    flags = dataclasses.asdict(config)
    del flags["configuration"]
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as files:
        run = partial(start, folder=Path(files))
        for figures in compare(Path(files), run, repeated=not config.quick):
            figures = {"config": flags, "steps": config.steps} | figures
            # To describe a GPU would take memory of it here; the processes that measure have described it.
            write_record(json_file, torch.device("cpu"), figures)
    if all(row["note"] for row in figures["rows"]):
        raise UserError(f"no configuration could be measured: {figures['rows'][0]['note']}")
    peaks = ", ".join(f"{name} {tflops:.3g}" for name, tflops in figures["peaks"].items())
    print(f"\n{figures['flops_per_sample'] / 1e9:.3g} GFLOP per sample; peak of matrix products in TFLOP/s: {peaks}")
    print(f"errors are relative to float64; validation loss is after {config.steps} steps\n\n{table(figures)}")
    plot(figures, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)

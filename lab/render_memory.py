"""Turn what lesson 05's experiments compute about memory into parts of its page, and into a figure; cog calls this.

python lab/render_memory.py      # draws results/memory_bars.png
"""

import json
import re
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from lab import memory_tables
from lab.render import RESULTS, machine, table

GB = 1e9
FILE = RESULTS / "memory.json"
PLOT = RESULTS / "memory_bars.png"
COLOURS = {
    "parameters": "tab:blue",
    "gradients": "tab:orange",
    "optimizer state": "tab:green",
    "gathered weights": "tab:cyan",
    "gradients to send": "gold",
    "activations": "tab:red",
    "temporaries": "tab:gray",
    "batch": "black",
}
"""of the parts of a bar, from bottom to top"""
NAMES = {"ddp": "DDP", "blocks": "`blocks`", "keep": "`keep`", "root": "`root`"}


def load(part: str) -> dict[str, Any]:
    """Return the figures of a part of `lab/measure_memory.py`; none if it was not run."""
    return json.loads(FILE.read_text()).get(part, {}) if FILE.exists() else {}


def missing(part: str) -> str:
    """Say that the figures are missing, and how to get them."""
    return f"*Not computed yet: `python lab/measure_memory.py {part}`.*"


def source(results: dict[str, Any], verb: str = "Computed") -> str:
    """Return the caption under a table: where it was computed, and the command that does so again."""
    return f"*{verb} on {machine(results)}, with `{results['typed']}`.*"


def in_gb(count: float) -> str:
    """Return a number of bytes in GB."""
    return f"{count / GB:.2f}"


def yes(value: bool) -> str:
    """Return yes or no."""
    return "yes" if value else "no"


def marked(header: list[str], cells: list[list[str]]) -> str:
    """Return a table of `lab.memory_tables` in Markdown: names as code, peaks in bold type."""
    shown = [
        [
            re.sub(r"^(?!DDP|GB)\w+", r"`\g<0>`", cell) if number == 0 else f"**{cell}**" if name == "peak" else cell
            for number, (name, cell) in enumerate(zip(header, row, strict=True))
        ]
        for row in cells
    ]
    return table(header, shown)


def sources(found: list[dict[str, Any]]) -> str:
    """Return the caption under a table of several parts that were computed on the same machine."""
    (where,) = {machine(results) for results in found}
    commands = dict.fromkeys(f"`{results['typed']}`" for results in found)
    return f"*Computed on {where}, with {', '.join(commands)}.*"


def what_fills() -> str:
    """Render what fills the memory for the lesson's models."""
    results = load("what_fills")
    if not results:
        return missing("what_fills")
    seconds = [row["cpu_seconds"] for row in results["rows"]]
    counts = {row["model"]: f"`{row['model']}` {row['parameters'] / 1e6:,.1f}" for row in results["rows"]}
    note = (
        f"Million parameters: {', '.join(counts.values())}. AdamW. A row took {min(seconds):.1f} to {max(seconds):.1f} "
        "seconds of one CPU."
    )
    return "\n".join([marked(*memory_tables.what_fills(results["rows"])), "", note, source(results)])


def what_helps() -> str:
    """Render when the peak is, and what each cure leaves of it, for the lesson's models."""
    results = load("what_fills")
    if not results:
        return missing("what_fills")
    return "\n".join([marked(*memory_tables.what_helps(results["rows"])), "", source(results)])


def two_ranks() -> str:
    """Render predicted and measured bytes of two real ranks."""
    results = load("two_ranks")
    if not results:
        return missing("two_ranks")
    rows = [
        (
            NAMES[row["way"]],
            yes(row["checkpointing"]),
            f"{row['predicted'] / 1e6:.2f}",
            f"{row['measured'] / 1e6:.2f}",
            f"{row['ratio'] - 1:+.1%}",
        )
        for row in results["rows"]
    ]
    header = ["", "checkpointing", "predicted, MB per rank", "measured", "difference"]
    return "\n".join([table(header, rows), "", source(results, "Measured")])


SEVEN = ("seven_ways", "seven_64", "seven_1024", "seven_1024_recomputed", "seven_groups")
"""all that was computed of the language model of 7 billion weights"""
SHORT = (
    ("ddp", 8, False),
    ("blocks", 8, False),
    ("blocks", 64, False),
    ("blocks", 1024, False),
    ("blocks", 1024, True),
)
"""way, ranks and activation checkpointing of the rows that the lesson's page shows"""


def fit(*parts: str, short: bool = False) -> str:
    """Render bytes per rank of one model, from several parts; all rows, or those of `SHORT` in its order."""
    found = [results for results in map(load, parts) if results]
    if not found:
        return missing(" ".join(parts))
    rows = [row for results in found for row in results["rows"]]
    if short:
        by_kind = {(row["way"], row["ranks"], row["checkpointing"]): row for row in rows if row["replicas"] == 1}
        rows = [by_kind[kind] for kind in SHORT]
    model = found[0]
    what = (
        f"{model['what'][0].upper()}{model['what'][1:]}; {rows[0]['parameters'] / 1e9:.2f} billion parameters, "
        f"{model['batch_size']} sample(s) per rank, {model['precision']}, AdamW."
    )
    absent = [missing(part) for part in parts if not load(part)]
    return "\n".join([marked(*memory_tables.forecast(rows)), "", what, sources(found), *absent])


def step_times(*parts: str) -> str:
    """Render the bounds of the time of a step of one model, from several parts."""
    found = [results for results in map(load, parts) if results]
    if not found:
        return missing(" ".join(parts))
    model = found[0]
    speeds = (
        f"Assumed: {model['tflops']:g} TFLOP/s per rank, {model['gb_per_second']:g} GB/s and {model['alpha_us']:g} µs "
        "per message."
    )
    rows = [row for results in found for row in results["rows"]]
    return "\n".join([marked(*memory_tables.times(rows)), "", speeds, sources(found)])


def gpus() -> str:
    """Render what fits into GPUs of several sizes."""
    parts = {part: load(part) for part in ("gpu_unet", "gpu_vit3d", "gpu_seven", "gpu_seventy")}
    if not any(parts.values()):
        return missing(" ".join(parts))
    rows = []
    for results in parts.values():
        for row in results.get("rows", []):
            fewest, batch, depth = (row[name] for name in ("fewest_ranks", "largest_batch", "most_blocks"))
            rows.append(
                (
                    f"`{results['model']}`, {results['precision']}",
                    f"{NAMES[row['way']]}{', recomputed' if row['checkpointing'] else ''}",
                    f"{row['budget_gb']:g}",
                    "-" if row["way"] == "ddp" else number(fewest),
                    f"{number(batch)} on {row['ranks']}",
                    "-" if depth is None else f"{number(depth)} on {row['ranks']}",
                )
            )
    header = ["model, precision", "", "GB", "fewest ranks for one sample each", "largest batch per rank", "most blocks"]
    found = [results for results in parts.values() if results]
    note = f"{found[0]['reserve_gb']:g} GB of each are left for what is not counted."
    absent = [missing(part) for part, results in parts.items() if not results]
    return "\n".join([table(header, rows), "", note, sources(found), *absent])


def number(found: dict[str, Any]) -> str:
    """Return a number that was found to fit, or that there is none."""
    return f"{'about ' if found.get('estimated') else ''}{found['number']:,}" if found["number"] else "none"


def bars() -> str:
    """Render the link to the figure, and where it comes from."""
    results = load("bars")
    if not results:
        return missing("bars")
    alt = (
        "Stacked bars of GB per rank: DDP needs the same on 2, 8 and 64 ranks; with FSDP2 weights, gradients and "
        "optimizer state shrink with the number of ranks, the activations do not; with activation checkpointing they "
        "are small"
    )
    return f"![{alt}](../../results/{PLOT.name})\n\n{source(results)}"


def plot() -> None:
    """Draw what fills the memory of a rank with DDP and with FSDP2, by number of ranks, into `PLOT`."""
    results = load("bars")
    kinds = {
        ("ddp", False): "DDP",
        ("blocks", False): "FSDP2, per block",
        ("blocks", True): "FSDP2, per block,\nactivation checkpointing",
    }
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    places: list[float] = []
    labels, titles = [], []
    for kind, title in kinds.items():
        rows = [row for row in results["rows"] if (row["way"], row["checkpointing"]) == kind]
        first = (places[-1] + 2 if places else 0.0) - 0.2
        for place, row in enumerate(rows):
            bottom = 0.0
            for part, colour in COLOURS.items():
                height = row["parts"][part] / GB
                label = part if not places else None
                axes.bar(first + place, height, 0.8, bottom=bottom, color=colour, label=label)
                bottom += height
            axes.text(first + place, bottom + 0.3, f"{bottom:.1f}", ha="center")
            places.append(first + place)
            labels.append(f"{row['ranks']}")
        titles.append((first + (len(rows) - 1) / 2, title))
    axes.set_xticks(places, labels)
    top = max(row["peak"] for row in results["rows"]) / GB
    for middle, title in titles:
        axes.text(middle, 1.17 * top, title, ha="center", va="center", fontweight="bold", fontsize=9)
    axes.set_ylim(0, 1.27 * top)
    axes.yaxis.set_major_locator(MultipleLocator(5))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set(xlabel="ranks", ylabel="GB per rank at the peak")
    count = results["rows"][0]["parameters"] / 1e9
    batch = results["batch_size"]
    axes.set_title(
        f"What fills the memory: vision transformer of {count:.2f} billion parameters, {batch} volumes per rank, "
        f"{results['precision']}",
        fontsize=10,
    )
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    plot()

"""Turn the figures of lesson 05 on two CPU ranks into parts of its page; cog calls this.

`python lab/render_sharding.py` draws the schematic plot of what each rank stores.
"""

import re
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lab.example_output import FOLDER
from lab.output_05 import COMMANDS
from lab.render import RESULTS, figure, load, not_measured, source, table

SCHEMATIC = RESULTS / "what_each_rank_stores.png"
WEIGHTS, GRADIENTS, STATE = "#56B4E9", "#E69F00", "#009E73"
"""colours that people who are colour-blind can distinguish (Okabe and Ito)"""
BLOCKS = 4
RANKS = 2


def megabytes(size: float) -> str:
    """Return bytes as MB with one digit after the point."""
    return f"{size / 1e6:,.1f}"


SPEEDS = (r"  [\d,]+ samples/s  load .* ms$", r"  [\d.]+ s  [\d,]+ samples/s$")
"""of a line of training and of an epoch: left out, because they differ from run to run"""


def output(name: str) -> str:
    """Return what a command of the lesson's page printed when it was run for the page."""
    command, _, text = (FOLDER / f"05_fully_sharded_{name}.txt").read_text().partition("\n")
    if command != f"$ {COMMANDS[name]}":
        raise ValueError(f"python lab/output_05.py {name}: the command has changed")
    for pattern in SPEEDS:
        text = re.sub(pattern, "  ...", text, flags=re.MULTILINE)
    return f"```text\n{text}```"


def same_losses() -> str:
    """Render the losses of lessons 04 and 05 by the number of ranks, and how much they differ."""
    results = load("same_losses")
    if not results:
        return not_measured("same_losses")
    rows = [
        (
            {"DDP": "04, DDP", "FSDP2": "05, FSDP2"}[row["method"]],
            str(row["ranks"]),
            f"{row['train_loss']:.7f}",
            f"{row['val_loss']:.7f}",
            f"{row['val_accuracy']:.2%}",
        )
        for row in results["rows"]
    ]
    about = (
        f"One epoch of {results['samples']:,} samples in steps of 64, however many ranks share them. The largest "
        f"relative difference of a loss from that of the first row is {results['largest_difference']:.0e}."
    )
    return "\n".join(
        [table(["lesson", "ranks", "train loss", "validation loss", "accuracy"], rows), "", about, source(results)]
    )


def save_and_reshard() -> str:
    """Render which ranks resumed both forms of checkpoint, what saving costs, and what damage does."""
    results = load("save_and_reshard")
    if not results:
        return not_measured("save_and_reshard")
    resumed = [
        (
            row["form"],
            "not stopped" if row["resumed_by"] is None else str(row["resumed_by"]),
            *(f"{loss:.6f}" for loss in row["losses"]),
            f"{row['difference']:.0e}" if row["difference"] else "0",
        )
        for row in results["resumed"]
    ]
    header = ["form", "resumed on ranks", "train loss", "validation loss", "differs by"]
    costs = results["costs"]
    cost_rows = [
        (way, megabytes(values["memory_bytes"]), f"{values['returned_share']:.2f}")
        for way, values in costs["medians"].items()
    ]
    damaged = results["damaged"]
    wrong = damaged["wrong_weights"]
    of_dcp = (
        f"`dcp.load` reports `{damaged['dcp_error']}`"
        if damaged["dcp_error"]
        else f"`dcp.load` reports nothing, and {wrong:,} weights are wrong"
    )
    return "\n".join(
        [
            f"Saved by {results['saved_by']} ranks after the first epoch; the losses of the second one:",
            "",
            table(header, resumed),
            "",
            f"What saving costs, for a model of {costs['parameters']:,} parameters, whose weights and optimizer state "
            f"are {megabytes(costs['state_bytes'])} MB ({megabytes(costs['part_bytes'])} MB of it on rank 0):",
            "",
            table(
                ["saved as", "more memory on rank 0, MB", "share of its time in which training waits"],
                cost_rows,
            ),
            "",
            f"Then {damaged['zeroed_bytes']:,} bytes of one file of the sharded checkpoint were set to zero: {of_dcp}. "
            f"The lesson stops with `{damaged['lesson_error']}`",
            "",
            source(results),
        ]
    )


def limited_memory() -> str:
    """Render which lessons train in the limited memory, and how much each of them needed."""
    results = load("limited_memory")
    if not results:
        return not_measured("limited_memory")
    rows = []
    for row in results["rows"]:
        limited = row["budget_mb"] == results["budget_mb"]
        if "message" in row:
            outcome, needed = f"stops in `{row['line']}`", f"more than {row['budget_mb']}"
        else:
            outcome, needed = "trains", f"{max(row['peak_bytes']) / 1e6:,.0f}"
        name = {"04": "04, DDP", "05": "05, FSDP2"}[row["lesson"][:2]]
        rows.append((name, str(row["ranks"]), f"{row['budget_mb']}" if limited else "none", needed, outcome))
    message = next((row["message"] for row in results["rows"] if "message" in row), "")
    about = (
        f"The model has {results['parameters'] / 1e6:.1f} million parameters, which is "
        f"{results['state_bytes'] / 1e6:,.0f} MB of weights, gradients and optimizer state."
    )
    header = ["lesson", "ranks", "limit, MB", "most that a rank needed, MB", "what happens"]
    lines = [about, f"The message is `{message}`."] if message else [about]
    return "\n".join([table(header, rows), "", *lines, source(results)])


def stored_weight() -> str:
    """Render one weight as each rank stores it, with DDP and with FSDP2."""
    results = load("one_step")
    if not results:
        return not_measured("one_step")
    rows = [
        (
            way,
            str(facts["rank"]),
            f"`{facts['type']}`",
            f"`{tuple(facts['shape'])}`",
            f"`{facts['placements']}`" if "placements" in facts else "",
            f"`{tuple(facts['local_shape'])}`",
        )
        for way in ("DDP", "--shard blocks")
        for facts in (of_rank[way] for of_rank in results["stored"])
    ]
    header = ["", "rank", "type", "shape", "placements", "stored on this rank"]
    return "\n".join([table(header, rows), "", source(results)])


def one_step() -> str:
    """Render the collectives, bytes and losses of one step with DDP and each --shard."""
    results = load("one_step")
    if not results:
        return not_measured("one_step")
    rows = [
        (
            row["way"] if row["way"] == "DDP" else f"`{row['way']}`",
            *(str(row["collectives"][kind]) for kind in ("all-reduces", "all-gathers", "reduce-scatters")),
            megabytes(row["stored_bytes"]),
            megabytes(row["peak_bytes"]),
            f"{row['losses'][1]:.6f}",
        )
        for row in results["rows"]
    ]
    header = ["", "all-reduces", "all-gathers", "reduce-scatters", "MB between steps", "MB at most", "loss of step 2"]
    return "\n".join([table(header, rows), "", source(results)])


def slower_than_ddp() -> str:
    """Render how much longer a step takes than with DDP on these ranks."""
    results = load("one_step")
    if not results:
        return not_measured("one_step")
    ratios = [f"`{row['way']}` {row['seconds_against_ddp']:.1f} times" for row in results["rows"][1:]]
    how = f"medians of {results['config']['steps']} pairs that were measured alternately"
    return f"In the run of the tables above, a step took {', '.join(ratios)} as long as a step of DDP ({how})."


def recompute() -> str:
    """Render what checkpointing keeps, needs and computes, by what it is put around."""
    results = load("recompute")
    if not results:
        return not_measured("recompute")
    plain = results["rows"][0]
    rows = [
        (
            row["way"],
            megabytes(row["kept_bytes"]),
            megabytes(row["peak_bytes"]),
            f"{row['flops'] / 1e9:.2f}",
            f"{row['flops'] / plain['flops'] - 1:+.1%}",
        )
        for row in results["rows"]
    ]
    header = ["checkpoint around", "kept for backward, MB", "MB at most", "GFLOP in a step", "more"]
    return "\n".join([table(header, rows), "", source(results)])


def accumulation() -> str:
    """Render the collectives and bytes of gradient accumulation."""
    results = load("accumulation")
    if not results:
        return not_measured("accumulation")
    rows = [
        (
            row["way"],
            *(str(row["collectives"][kind]) for kind in ("all-gathers", "reduce-scatters")),
            megabytes(row["peak_bytes"]),
            f"{row['gradient_difference']:.0e}" if row["gradient_difference"] else "",
        )
        for row in results["rows"]
    ]
    header = ["", "all-gathers", "reduce-scatters", "MB at most", "relative difference of the gradient"]
    whole = f"The gradients of the whole model, not sharded, are {megabytes(results['gradient_bytes'])} MB."
    return "\n".join([table(header, rows), "", whole, source(results)])


def small_updates() -> str:
    """Render the share of weights that a step changes, by the format that they are stored in."""
    results = load("small_updates")
    if not results:
        return not_measured("small_updates")
    formats = list(dict.fromkeys(row["stored"] for row in results["rows"]))
    shares = {(row["stored"], row["lr"]): row["changed"] for row in results["rows"]}
    rates = sorted({row["lr"] for row in results["rows"]}, reverse=True)
    rows = [(f"{lr:g}", *(f"{shares[name, lr]:.1%}" for name in formats)) for lr in rates]
    header = ["learning rate", *(f"changed, stored in {name}" for name in formats)]
    return "\n".join([table(header, rows), "", source(results)])


def meta_device() -> str:
    """Render how many rows of a matrix differ, by who has filled it."""
    results = load("meta_device")
    if not results:
        return not_measured("meta_device")
    rows = [(row["way"], str(row["rows"]), str(row["distinct"])) for row in results["rows"]]
    buffer = results["buffer"]
    same = buffer["after_meta"] == buffer["set_by_init"]
    outcome = "has that value afterwards by chance" if same else f"has the value {buffer['after_meta']:.1g} afterwards"
    note = f"A buffer that `__init__` sets to {buffer['set_by_init']:g}, and that is not in the state dict, {outcome}."
    return "\n".join([table(["weights", "rows of the matrix", "different rows"], rows), "", note, source(results)])


def step_timeline() -> str:
    """Render the plot of one training step on two ranks."""
    results = load("step_timeline")
    if not results:
        return not_measured("step_timeline")
    what = (
        "Two time lines, one for each rank. In forward, weights are gathered for the blocks 0, 1, 2 and 3 before each "
        "of them computes; in backward for 3, 2, 1 and 0, one block ahead; gradients are reduced after each block. "
        "While weights or gradients are sent, the training thread is in FSDP2"
    )
    first = results["rows"][0]
    times = first["milliseconds"]
    share = first["milliseconds_in_fsdp"] / (times["forward"] + times["backward"])
    words = (
        f"On rank 0, {first['all_gathers']} all-gathers and {first['reduce_scatters']} reduce-scatters; "
        f"{share:.0%} of forward and backward were spent in FSDP2's own code, which copies and waits."
    )
    return "\n".join([figure("step_timeline", what), "", words, source(results)])


def schematic() -> str:
    """Render the plot of what each rank stores; the path is that for the page of the lesson."""
    what = (
        "Four panels. In the optimizer's step, each of two ranks stores all weights, gradients and optimizer state of "
        "four blocks with DDP. With FSDP2 each stores one half of those of every block; while block 1 computes, each "
        "rank also has the other half of the weights of block 1; while block 1 is in backward, also its whole gradients"
    )
    return f"![{what}](../results/{SCHEMATIC.name})"


def draw_schematic() -> None:
    """Draw what two ranks store in the optimizer's step, with DDP and FSDP2, and with FSDP2 before it."""
    plot = Figure(figsize=(11, 6.4), dpi=110, layout="constrained")
    panels = plot.subplots(2, 2).flat
    moments = (
        ("DDP, optimizer's step: everything on every rank", None, False),
        ("FSDP2, optimizer's step: half of everything", None, True),
        ("FSDP2, block 1 in forward: its weights are gathered", "forward", True),
        ("FSDP2, block 1 in backward: whole gradients, too", "backward", True),
    )
    for axes, (title, moment, is_sharded) in zip(panels, moments, strict=True):
        for rank in range(RANKS):
            draw_rank(axes, rank, moment, is_sharded)
        axes.set(xlim=(-0.1, RANKS * 5.6 - 0.3), ylim=(BLOCKS + 0.15, -1.15))
        axes.set_title(title, fontsize=11, fontweight="bold", loc="left")
        axes.axis("off")
    names = {"weights": WEIGHTS, "gradients": GRADIENTS, "optimizer state": STATE}
    handles = [Patch(facecolor=colour, edgecolor="black", label=name) for name, colour in names.items()]
    handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="whole for a moment, then freed"))
    handles.append(Patch(facecolor="white", edgecolor="lightgrey", label="elsewhere, or not computed yet"))
    plot.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=10, frameon=False)
    plot.savefig(SCHEMATIC)


def draw_rank(axes: Any, rank: int, moment: str | None, is_sharded: bool) -> None:  # noqa: ANN401
    """Draw the memory of one rank: a row for each block, with weights, gradients and optimizer state."""
    left = rank * 5.6
    axes.text(left + 2.85, -0.85, f"rank {rank}", ha="center", va="center", fontsize=10)
    for block in range(BLOCKS):
        axes.text(left + 0.55, block + 0.4, f"block {block}", ha="right", va="center", fontsize=8)
        for start, width, colour, kind in (
            (0.7, 1.0, WEIGHTS, "weights"),
            (1.9, 1.0, GRADIENTS, "gradients"),
            (3.1, 2.0, STATE, "state"),
        ):
            axes.add_patch(Rectangle((left + start, block), width, 0.8, facecolor="white", edgecolor="lightgrey"))
            share = width / RANKS if is_sharded else width
            own = left + start + (rank * share if is_sharded else 0)
            here = not (kind == "gradients" and moment == "forward")
            here = here and not (kind == "gradients" and moment == "backward" and block < 1)
            if here:
                axes.add_patch(Rectangle((own, block), share, 0.8, facecolor=colour, edgecolor="black"))
            gathered = block == 1 and (
                (kind == "weights" and moment in ("forward", "backward"))
                or (kind == "gradients" and moment == "backward")
            )
            if gathered:
                other = left + start + (RANKS - 1 - rank) * share
                box = Rectangle(
                    (other, block), share, 0.8, facecolor=colour, edgecolor="black", hatch="////", alpha=0.6
                )
                axes.add_patch(box)


if __name__ == "__main__":
    draw_schematic()

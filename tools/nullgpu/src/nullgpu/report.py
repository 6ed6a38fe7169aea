"""Show what the processes of a command have noted: an update on the host's side, the memory, what to change first."""

import json
import linecache
import os
import shutil
import sys
from pathlib import Path
from typing import Any

LAUNCH_BOUND = 500
"""launches in an update from which on a graph or a compiler is worth a try"""
SHOWN = 5
"""lines for each kind of event"""
FRAGMENTED, LEAST_GAP = 1.5, 2**28
"""times the memory in use, and bytes more than it, from which on reserved memory counts as fragmented"""
SAVES = ("torch.save(", "state_dict(", "save_checkpoint", ".save(")
"""parts of a line of code that writes a checkpoint"""


def show(folder: Path, snapshot: Path) -> dict[str, Any]:
    """Print the report of the lowest rank, and a line for each other rank whose peak differs from it.

    Args:
        folder: in which the processes of the command have left what they noted.
        snapshot: file for the history of the memory of the lowest rank.

    Returns: The figures: for each of "ranks" what `record.Recorder.write` has noted, and "limit", "holder" and
        "advice", the three sentences at the end of the report.
    """
    ranks = sorted((json.loads(file.read_text()) for file in folder.glob("rank*.json")), key=lambda it: it["rank"])
    if not ranks:
        print("nullgpu: no report: no process of the command has launched a kernel, or it was killed", file=sys.stderr)
        return {"ranks": []}
    shutil.copyfile(folder / f"rank{ranks[0]['rank']}.pickle", snapshot)
    lines = [*lines_of(ranks[0]), *others(ranks)]
    lines += ["", f"The memory over time: drop the file {snapshot} on https://pytorch.org/memory_viz"]
    print("", *lines, sep="\n", flush=True)
    return {"ranks": [it | said(it) for it in ranks]}


def others(ranks: list[dict[str, Any]]) -> list[str]:
    """Return a line for each rank whose peak differs from the peak of the first one by more than one percent."""
    first = ranks[0]["peak"]
    different = [it for it in ranks[1:] if abs(it["peak"] - first) > first / 100]
    return [f"Rank {it['rank']} has another peak: {size(it['peak'])}." for it in different]


def lines_of(it: dict[str, Any]) -> list[str]:
    """Return the report of one rank."""
    rank = f"rank {it['rank']} of {it['world']}, " if it["world"] > 1 else ""
    lines = [f"== {rank}{it['device']} with {it['memory'] / 2**30:g} GiB, torch {it['torch']}"]
    if not it["values"]:
        lines.append(
            "   Nothing is computed: values on the GPU are zeros, or what was there before, so the loss means nothing."
        )
    step = step_of(it)
    if it["step"]:
        lines += ["", f"An update (mean of {it['counted']}, without the first {it['updates'] - it['counted']}):"]
    else:
        lines += ["", "The whole run (no optimizer has made an update):"]
    sentences = said(it)
    return [
        *lines,
        *events(it, step),
        *memory(it),
        "",
        f"What limits the host: {sentences['limit']}",
        f"What holds the memory: {sentences['holder']}",
        f"What to change first: {sentences['advice']}",
    ]


def step_of(it: dict[str, Any]) -> dict[str, float]:
    """Return what was counted in an update; in the whole run if no optimizer has made one."""
    whole = {name: float(value) for name, value in it["total"].items()} | {"seconds": 0.0, "loading": 0.0}
    return it["step"] or whole


def said(it: dict[str, Any]) -> dict[str, str]:
    """Return three sentences: what limits an update on the host's side, what holds the memory, what to change first."""
    step = step_of(it)
    return {"limit": host_limit(it, step), "holder": memory_holder(it), "advice": first_change(it, step)}


def events(it: dict[str, Any], step: dict[str, float]) -> list[str]:
    """Return what happens in an update, with the lines of the script."""
    copies = step["copies_to_gpu"] + step["copies_from_gpu"]
    copied = (step["bytes_to_gpu"] + step["bytes_from_gpu"]) / 1e6
    lines = [
        f"{step['launches']:9,.0f}  kernel launches",
        f"{step['graph_launches']:9,.0f}  replays of a CUDA graph",
        f"{number(step['waits'])}  waits of the CPU for the GPU",
        *by_line(it, "wait"),
        f"{number(copies)}  copies between CPU and GPU, {copied:,.2f} MB",
        *by_line(it, "copy"),
        f"{number(step['collectives'])}  collectives, {step['collective_bytes'] / 1e6:,.2f} MB",
        *by_line(it, "collective"),
    ]
    if step["seconds"]:
        values = "; computing the values included" if it["values"] else ""
        loading = f"{1e3 * step['loading']:,.1f} of them in waiting for the loader"
        lines.append(f"{1e3 * step['seconds']:9,.1f}  ms of this machine's CPU, {loading}{values}")
    return lines


def by_line(it: dict[str, Any], what: str) -> list[str]:
    """Return a line for each place where something happens in an update."""
    rows = sorted((row for row in it["lines"] if row[0] == what), key=lambda row: (-row[3], row[2], row[1]))
    shown = [
        f"        {number(often)}  {described(what, detail)}  {short(place)}"
        for _, detail, place, often in rows[:SHOWN]
    ]
    more = len(rows) - SHOWN
    return shown + ([f"{'':17}  and {more} further {'place' if more == 1 else 'places'}"] if more > 0 else [])


def number(mean: float) -> str:
    """Return a mean number in nine characters, with two decimals only if it is no whole number."""
    return f"{mean:9,.0f}" if abs(mean - round(mean)) < 0.005 else f"{mean:9,.2f}"


def described(what: str, detail: str) -> str:
    """Return the kind of an event: the function that waits, the way of a copy, the name of a collective."""
    if what != "copy":
        return detail
    way, kind = detail.split()
    return f"{way} the GPU, {kind}"


def memory(it: dict[str, Any]) -> list[str]:
    """Return the peak, and the lines that have allocated what is in use there."""
    holders = it["holders"]
    if it["out_of_memory"]:
        lines = ["", f"OUT OF MEMORY. PyTorch's allocator had {size(holders['peak'])} in use, allocated in:"]
    else:
        peak = f"{size(it['peak'])} allocated at the peak, {size(it['reserved'])} reserved"
        lines = ["", f"Memory, by PyTorch's own allocator: {peak}. At the peak:"]
    whole = max(holders["peak"], 1)
    lines += [
        f"{size(bytes_):>11}  {100 * bytes_ / whole:3.0f} %  {short(place)}" for place, bytes_ in holders["lines"]
    ]
    if is_fragmented(it):
        times = f"{it['reserved'] / it['peak']:.1f} times"
        lines.append(f"  Reserved is {times} as much as was in use: the free parts are too small for later tensors.")
    return lines + ([] if holders["complete"] else ["  (of the last 200,000 allocations and frees)"])


def is_fragmented(it: dict[str, Any]) -> bool:
    """Whether the allocator has reserved much more than was ever in use."""
    return it["reserved"] > max(FRAGMENTED * it["peak"], it["peak"] + LEAST_GAP)


def short(place: str) -> str:
    """Return FILE:LINE with the code of the line; the file relative to where the user is."""
    where, _, function = place.partition(" in ")
    file, _, line = where.rpartition(":")
    if not line.isdigit():
        return place
    code = " ".join(linecache.getline(file, int(line)).split())
    file = min(file, os.path.relpath(file), key=len)
    return (
        f"{file}:{line}  {code if len(code) < 60 else code[:57].rpartition(' ')[0] + ' ...'}"
        if code
        else f"{file}:{line} in {function}"
    )


def size(bytes_: float) -> str:
    """Return a size in the unit that fits."""
    return f"{bytes_ / 1e9:.2f} GB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.2f} MB"


def own_waits(it: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the lines of the script that wait, and how often in an update, if they wait in at least every second one.

    Waits for an event are not counted: DDP does so in its first updates, and what times a GPU has to.
    """
    waits = [row for row in it["lines"] if row[0] == "wait" and row[1] != "cudaEventSynchronize" and ":" in row[2]]
    found = [(short(place), often) for _, _, place, often in waits]
    return found if it["updates"] and sum(often for _, often in found) >= 0.5 else []


def first_place(it: dict[str, Any], what: str, part: str = "") -> str:
    """Return the place of the user's where something happens most; "" if not in every second update."""
    rows = (row for row in it["lines"] if row[0] == what and part in row[1] and row[3] >= 0.5)
    places = (place for _, _, place, _ in rows)
    return next((short(place) for place in places if not place.startswith("in ")), "")


def loading_share(step: dict[str, float]) -> float:
    """Return the share of an update that is spent in waiting for the loader."""
    return step["loading"] / step["seconds"] if step["seconds"] else 0.0


def host_limit(it: dict[str, Any], step: dict[str, float]) -> str:
    """Say what the CPU does in an update while a GPU could be waiting for it."""
    if loading_share(step) > 0.5:
        return f"loading, with {loading_share(step):.0%} of the CPU's time in an update."
    if not it["updates"]:
        return "not known, because no optimizer has made an update."
    if own := own_waits(it):
        often = number(sum(often for _, often in own)).strip()
        return (
            f"{often} wait(s) in an update, in which the CPU cannot launch ahead of the GPU, most often at {own[0][0]}."
        )
    if step["graph_launches"] >= 1 and step["launches"] < LAUNCH_BOUND:
        return "nothing: an update is a replay of a graph, and the CPU does not wait."
    return (
        f"launching {step['launches']:,.0f} kernels, without a wait. A GPU that computes faster than the CPU launches "
        "is idle in between."
    )


def memory_holder(it: dict[str, Any]) -> str:
    """Say which line holds the most memory at the peak."""
    if not it["holders"]["lines"]:
        return "nothing."
    place, bytes_ = it["holders"]["lines"][0]
    share = bytes_ / max(it["holders"]["peak"], 1)
    return f"{size(bytes_)}, {share:.0%} of it, was allocated {'at ' if ':' in place else ''}{short(place)}."


def first_change(it: dict[str, Any], step: dict[str, float]) -> str:
    """Say what is worth the first try."""
    if it["out_of_memory"] or it["peak"] > 0.9 * it["memory"]:
        return "the memory: smaller parts of the batch (accumulation), activation checkpointing, or more ranks (FSDP2)."
    if loading_share(step) > 0.5:
        return "the loader: more workers, or data that are decoded once."
    if own := own_waits(it):
        if any(row[0] == "copy" and row[1].startswith("to ") and short(row[2]) == own[0][0] for row in it["lines"]):
            if "tensor(" in own[0][0]:  # which no loader has made
                return f"the copy at {own[0][0]}, which makes the CPU wait: make it on the GPU, or not in each update."
            return f"non_blocking=True, with pin_memory=True in the loader: the copy at {own[0][0]} makes the CPU wait."
        if any(part in own[0][0] for part in SAVES):
            return (
                f"the checkpoint at {own[0][0]}: write it less often, or let a thread write it "
                "(torch.distributed.checkpoint.async_save)."
            )
        return f"the wait at {own[0][0]}: keep the value on the GPU, and read it every 50 updates."
    if where := first_place(it, "copy", "to pageable"):
        return f"pin_memory=True in the loader: the copy from pageable memory makes the CPU wait, at {where}."
    if is_fragmented(it):
        return (
            "the memory that is reserved, but not used: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or batches "
            "that are padded to a few lengths."
        )
    if step["launches"] >= LAUNCH_BOUND:
        return "the number of launches: a fused optimizer, torch.compile, or a CUDA graph."
    return "nothing stands out; measure on a GPU."

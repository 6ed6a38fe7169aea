"""Show what the processes of a command have noted: a step on the host's side, the memory, and what to change first."""

import argparse
import json
import linecache
import os
import shutil
import sys
from pathlib import Path
from typing import Any

LAUNCH_BOUND = 500
"""launches in an update from which on a graph or a compiler is worth a try"""
SNAPSHOT = "memory.pickle"


def show(folder: Path, options: argparse.Namespace) -> None:
    """Print the report of the lowest rank, and one line for each other rank that differs from it."""
    ranks = sorted((json.loads(file.read_text()) for file in folder.glob("rank*.json")), key=lambda it: it["rank"])
    if not ranks:
        print("nullgpu: no report: no process of the command has launched a kernel, or it was killed", file=sys.stderr)
        return
    target = Path(options.report or SNAPSHOT)
    shutil.copy(folder / f"rank{ranks[0]['rank']}.pickle", target)
    print("\n".join(["", *lines_of(ranks[0], options.values), *others(ranks), f"\nThe memory over time: drop {target} on https://pytorch.org/memory_viz"]))


def others(ranks: list[dict[str, Any]]) -> list[str]:
    """Return a line for each rank whose peak differs from that of the first one by more than a percent."""
    first = ranks[0]
    different = [it for it in ranks[1:] if abs(it["peak"] - first["peak"]) > first["peak"] / 100]
    return [f"rank {it['rank']}: peak {gb(it['peak'])}" for it in different]


def lines_of(it: dict[str, Any], values: bool) -> list[str]:
    """Return the report of one rank."""
    of = f"rank {it['rank']} of {it['world']}, " if it["world"] > 1 else ""
    lines = [f"== {of}{it['device']} with {gb(it['memory'])}, torch {it['torch']}"]
    if not values:
        lines.append("   (nothing is computed: all values are zeros, so the loss means nothing)")
    step = it["step"]
    if step:
        lines += ["", f"An update (median of {it['counted']}; {it['updates'] - it['counted']} before them are not counted)"]
    else:
        lines += ["", "The whole run (it has no update of an optimizer)"]
        step = {name: float(value) for name, value in it["total"].items()} | {"seconds": 0.0, "loading": 0.0}
    copies = step["copies_to_gpu"] + step["copies_from_gpu"]
    lines += [
        f"  {step['launches']:8,.0f}  kernel launches",
        f"  {step['graph_launches']:8,.0f}  replays of a graph",
        f"  {step['waits']:8,.0f}  waits of the CPU for the GPU",
        *by_line(it, "wait"),
        f"  {copies:8,.0f}  copies between CPU and GPU, {(step['bytes_to_gpu'] + step['bytes_from_gpu']) / 1e6:,.2f} MB",
        *by_line(it, "copy"),
        f"  {step['collectives']:8,.0f}  collectives, {step['collective_bytes'] / 1e6:,.2f} MB",
        *by_line(it, "collective"),
    ]
    if step["seconds"]:
        slower = "; computing the values included" if values else ""
        lines.append(f"  {1e3 * step['seconds']:8,.1f}  ms of this machine's CPU, {1e3 * step['loading']:,.1f} of them waiting for the loader{slower}")
    lines += ["", f"Memory: {gb(it['peak'])} at the peak, {gb(it['reserved'])} reserved, by PyTorch's own allocator. At the peak"]
    if it["out_of_memory"]:
        lines[-1] = f"OUT OF MEMORY, with {gb(it['holders']['peak'])} in use:"
    whole = max(it["holders"]["peak"], 1)
    lines += [f"  {gb(size):>10}  {100 * size / whole:3.0f} %  {short(place)}" for place, size in it["holders"]["lines"]]
    if not it["holders"]["complete"]:
        lines.append("  (of the last 200,000 allocations and frees)")
    return [*lines, "", *sentences(it, step)]


def by_line(it: dict[str, Any], what: str) -> list[str]:
    """Return a line for each place where something happens in an update, at most five."""
    rows = [row for row in it["lines"] if row[0] == what]
    shown = [f"            {row[3]:4,.0f}  {short(row[2])}  {row[1] if what != 'copy' else direction(row[1])}" for row in rows[:5]]
    return [*shown, *([f"                  and {len(rows) - 5} further places"] if len(rows) > 5 else [])]


def direction(detail: str) -> str:
    """Return how a copy goes, in words."""
    way, memory = detail.split()
    return f"{'to' if way == 'to' else 'from'} the GPU, {memory} memory"


def short(place: str) -> str:
    """Return FILE:LINE with the code of the line; the file relative to where the user is."""
    where, _, function = place.partition(" in ")
    file, _, line = where.rpartition(":")
    if not line.isdigit():
        return place
    code = " ".join(linecache.getline(file, int(line)).split())
    relative = os.path.relpath(file)
    file = relative if len(relative) < len(file) else file
    return f"{file}:{line} {code[:60] + '...' if len(code) > 63 else code}" if code else f"{file}:{line} in {function}"


def gb(size: float) -> str:
    """Return a size in the unit that fits."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def sentences(it: dict[str, Any], step: dict[str, float]) -> list[str]:
    """Return three sentences: what limits an update on the host's side, what holds the memory, what to change first."""
    return [f"What limits the host: {host_limit(it, step)}", f"What holds the memory: {memory_holder(it)}", f"What to change first: {first_change(it, step)}"]


def first_place(it: dict[str, Any], what: str, part: str = "") -> str | None:
    """Return the place where something happens most often."""
    return next((short(row[2]) for row in it["lines"] if row[0] == what and part in row[1]), None)


def host_limit(it: dict[str, Any], step: dict[str, float]) -> str:
    """Say what the CPU does in an update while a GPU could be waiting for it."""
    if step["seconds"] and step["loading"] > step["seconds"] / 2:
        return f"loading: {100 * step['loading'] / step['seconds']:.0f} % of the time of an update goes by in waiting for the loader."
    if step["waits"] >= 1:
        where = first_place(it, "wait") or "PyTorch itself"
        return f"{step['waits']:.0f} wait(s) in each update, so the CPU cannot launch ahead of the GPU; the first is {where}."
    if step["graph_launches"] >= 1 and step["launches"] < LAUNCH_BOUND:
        return "nothing: an update is a replay of a graph, and the CPU does not wait."
    return f"launching {step['launches']:,.0f} kernels, without a wait: a GPU that computes them faster than the CPU launches them is idle in between."


def memory_holder(it: dict[str, Any]) -> str:
    """Say which line holds the most memory at the peak."""
    if not it["holders"]["lines"]:
        return "nothing."
    (place, size), *_ = it["holders"]["lines"]
    share = 100 * size / max(it["holders"]["peak"], 1)
    return f"{gb(size)}, {share:.0f} % of it, was allocated {'' if place.startswith('in ') else 'in '}{short(place)}."


def first_change(it: dict[str, Any], step: dict[str, float]) -> str:
    """Say what is worth the first try."""
    if it["out_of_memory"] or it["peak"] > 0.9 * it["memory"]:
        return "the memory: smaller parts of the batch (accumulation), activation checkpointing, or weights sharded over more ranks."
    if step["seconds"] and step["loading"] > step["seconds"] / 2:
        return "the loader: more workers, or data that are decoded once."
    if step["waits"] >= 1 and (where := first_place(it, "wait")) and where != "in backward":
        return f"the wait in {where}: keep the value on the GPU, and read it every 50 updates."
    if where := first_place(it, "copy", "to pageable"):
        return f"pin_memory=True in the loader: {where} copies from pageable memory, which makes the CPU wait."
    if step["launches"] >= LAUNCH_BOUND:
        return "the number of launches: a fused optimizer, torch.compile, or a CUDA graph."
    return "nothing stands out; measure on a GPU."

"""The report: what was found, what is fine, what could not be judged; as text, Markdown, HTML or JSON."""

import html
import json
import os
import re
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .checks import Diagnosis, Finding
from .checks.base import NO_VALIDATION
from .events import Event
from .exercises import COURSE, link_to
from .runs import Run
from .settings import is_own

ENDINGS = {
    "end": "to its end",
    "enough": "ended by the doctor after enough updates",
    "stopped": "stopped by the doctor",
    "time": "ended by the doctor at the time limit",
    "hang": "ended by the doctor, because nothing moved any more",
    "lost": "ended by the doctor, because a rank ended and others did not",
}
HARDWARE = {
    "standin": "on CPUs, as if they were GPUs",
    "null": "on null GPUs",
    "real": "on GPUs",
    "none": "on CPUs",
}


def place(at: str) -> str:
    """Return file:line as seen from the present folder, if it lies there."""
    file, _, line = at.rpartition(":")
    near = os.path.relpath(file) if file else ""
    return f"{near}:{line}" if near and not near.startswith("..") else at


def errors(run: Run) -> list[tuple[int | None, Event]]:
    """Return the exceptions that ended processes of a run, with the rank if it is one."""
    found: list[tuple[int | None, Event]] = [(rank.number, e) for rank in run.ranks for e in rank.all("error")]
    return found + [(None, e) for e in run.others if e["e"] == "error"]


def is_standins_fault(run: Run, error: Event) -> bool:
    """Return whether an exception comes from what the stand-in for CUDA lacks, not from the script."""
    said = re.search(
        r"cuda|nccl|nvidia|\bGPU\b|stand-in|accelerator|ProcessGroupGloo",
        error["text"] + error["inner"],
        flags=re.IGNORECASE,
    )
    return run.launch.standin and bool(said or is_own(error["inner"])) and NO_SUCH_GPU not in error["text"]


def failures(run: Run) -> Iterator[str]:
    """Yield a line for each error of the script, and for each of the doctor."""
    seen = set()
    for rank, e in errors(run):
        said = " ".join(e["text"].split())[:300]
        key = e["type"], e["at"], said[:60]
        if key in seen:
            continue
        seen.add(key)
        who = "the script" if rank is None else f"rank {rank}"
        yield f"{who} ended with {e['type']} at {place(e['at'])}, after {e['step']} updates: {said}"
        if NO_SUCH_GPU in e["text"]:
            yield "  It asks for a GPU that it does not see: use local_rank % torch.cuda.device_count()."
        if is_standins_fault(run, e):
            yield (
                f"  This may be what the doctor's stand-in for CUDA lacks ({place(e['inner'])}), and no fault of the "
                "script: try --cpu, or --on_gpus."
            )
    failed = {rank for rank, _ in errors(run)}
    for number, status in enumerate(run.launch.statuses):
        if status is not None and status < 0:
            why = "perhaps because another rank had failed" if errors(run) else signal_of(-status)
            yield f"process {number} was ended by signal {-status}: {why}"
        elif status and number not in failed and None not in failed:
            yield f"process {number} ended with status {status}, and without an exception"
    for cut in run.cut:
        last = max(e["step"] for e in cut.events)
        yield (
            f"the doctor's notes of rank {cut.number} end at update {last}: there may be no space in "
            f"{tempfile.gettempdir()} (choose another TMPDIR), or the script ends with os._exit"
        )
    broken = {e["text"].strip().splitlines()[-1] for rank in run.ranks for e in rank.all("doctor_failed")}
    yield from (f"the doctor itself failed: {line}" for line in sorted(broken))


def signal_of(number: int) -> str:
    """Return what a signal that ended a process may mean."""
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    if number == signal.SIGKILL:
        return f"{name}, often because there was no memory left"
    return f"{name}; the doctor may be the cause: run the script without it"


def heading(run: Run) -> str:
    """Return what was run, and how it ended."""
    launch = run.launch
    updates = max((len(rank.all("update")) for rank in run.ranks), default=0)
    how = HARDWARE[launch.gpus]
    ranks = "1 rank" if run.world == 1 else f"{run.world} ranks"
    name = f" {launch.name}" if launch.name else ""
    return (
        f"{Path(launch.script).name}{name}: {ranks} {how}, {updates} updates in {launch.seconds:.0f} s, "
        f"{ENDINGS.get(launch.ended, launch.ended)}"
    )


def remarks(runs: list[Run]) -> Iterator[str]:
    """Yield what the user should know of the ordinary run beside the findings."""
    run = runs[0]
    if run.ranks and run.launch.world_size > 1 and run.world == 1:
        yield "The script did not join other ranks (init_process_group), so it was judged as one for a single process."
    noted = {e["file"] for rank in run.ranks for e in [*rank.all("write"), *rank.workers] if e["e"] == "write"}
    files = sorted(noted | set(run.launch.moved))
    if files:
        yield f"It wanted to write {len(files)} file(s), which went to a folder of the doctor's: {some_files(files)}"
    if run.launch.instead:
        yield f"Null GPUs are used, because the doctor's stand-in for CUDA could not run it: {run.launch.instead[:150]}"
    if any(e["stacks"] for rank in run.ranks for e in rank.all("profiler")):
        yield "Its profiler was run without stacks (with_stack), which end a process that the doctor watches."
    missing = sorted({name for rank in run.ranks for e in rank.all("no_values") for name in e["names"]})
    if missing:
        yield f"Null GPUs do not compute {', '.join(missing[:3])}: findings about values are not reliable here."
    if run.launch.left_out:
        yield f"Left out of --thorough: {'; '.join(run.launch.left_out)}."
    written = sorted({file for one in runs for file in one.launch.written})
    if written:
        yield (
            f"{len(written)} file(s) have changed meanwhile, by a library that the doctor cannot redirect or by "
            f"another program: {some_files(written)}"
        )
    programs = {(e["name"], e["at"]) for rank in run.ranks for e in rank.all("program") if e["at"] != "?"}
    for name, at in sorted(programs)[:3]:
        yield f"It starts a program, whose files the doctor cannot redirect: {name} at {place(at)}"


def some_files(files: list[str]) -> str:
    """Return some of the paths, as seen from here."""
    near = [os.path.relpath(file) if not os.path.relpath(file).startswith("..") else file for file in files]
    return ", ".join(near[:4]) + (", ..." if len(near) > 4 else "")


NO_SUCH_GPU = "invalid device ordinal"
"""in the text of CUDA's error"""
COLORS = {"FAULT": "\033[1;31m", "NOTE": "\033[1;33m", "COST": "\033[1;34m"}


def lines_of(finding: Finding, color: bool = False) -> Iterator[str]:
    """Yield the lines of a finding and its consequences."""
    where = f"  ({finding.run})" if finding.run else ""
    where += f"  ({finding.count} times)" if finding.count > 1 else ""
    kind = finding.kind.ljust(5)
    yield (
        f"{COLORS[finding.kind]}{kind}\033[0m  {place(finding.at)}{where}"
        if color
        else f"{kind}  {place(finding.at)}{where}"
    )
    yield f"       {finding.text}."
    yield f"       Fix: {finding.fix}."
    if finding.exercise:
        link = link_to(finding.exercise)
        yield f"       Exercise: {finding.exercise} ({COURSE})" + (f": {link}" if link else "")
    for consequence in finding.consequences:
        yield f"       What follows from it: {consequence.text} ({place(consequence.at)})."


def by_reason(unjudged: dict[str, str]) -> dict[str, list[str]]:
    """Return the titles for each reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for title, reason in unjudged.items():
        found[reason].append(title)
    return found


def text(runs: list[Run], diagnosis: Diagnosis, *, verbose: bool = False, color: bool = False) -> str:
    """Return the report as text: on one screen, or with ``verbose`` with lists of all that was looked at."""
    lines = []
    for run in runs:
        lines += [f"rankdoctor: {heading(run)}", *(f"  {line}" for line in failures(run))]
    lines += [f"  {line}" for line in remarks(runs)]
    for finding in diagnosis.findings:
        lines += ["", *lines_of(finding, color)]
    if not diagnosis.findings:
        lines += ["", "Nothing found."]
    updates = max((len(rank.all("update")) for rank in runs[0].ranks), default=0)
    seen = f"Seen done right in {updates} updates: {len(diagnosis.fine)}"
    if not verbose:
        lines += ["", f"{seen}.", f"Could not be judged: {len(diagnosis.unjudged)}."]
        lines += [f"Not used by the script: {len(diagnosis.unused)}. (--verbose lists all of them.)"]
        if NO_VALIDATION in diagnosis.unjudged.values():
            lines += [f"Of validation nothing is said: {NO_VALIDATION}."]
    if verbose and diagnosis.fine:
        lines += ["", seen, *(f"  {title} ({what})" for title, what in diagnosis.fine.items())]
    if verbose and diagnosis.unjudged:
        lines += ["", f"Could not be judged ({len(diagnosis.unjudged)}):"]
        for reason, titles in by_reason(diagnosis.unjudged).items():
            lines += [f"  {title}" for title in titles] + [f"      because {reason}"]
    if verbose and diagnosis.unused:
        lines += ["", f"Not used by the script: {', '.join(by_reason(diagnosis.unused))}."]
    lines += [f"The check {name} itself failed: {error}" for name, error in diagnosis.broken.items()]
    return "\n".join(lines)


def silent(run: Run) -> str:
    """Return the report on a run without any update of weights."""
    lines = [f"rankdoctor: {heading(run)}", *(f"  {line}" for line in failures(run))]
    lines += [f"  {line}" for line in reached(run)]
    lines += ["No update of weights was seen, so nothing can be said. The end of the output:"]
    lines += [f"  | {line}" for line in run.output.splitlines()[-15:]] or ["  (none)"]
    return "\n".join(lines)


def reached(run: Run) -> Iterator[str]:
    """Yield how far a run without an update has come, and where it stood when it was ended."""
    first: dict[str, float] = {}
    for e in (e for events in [*(rank.events for rank in run.ranks), run.others] for e in events):
        first[e["e"]] = min(e["t"], first.get(e["e"], e["t"]))
    steps = {"init": "process group", "loader": "loader", "batch": "batch", "model": "call of a model"}
    seen = [f"first {name} after {first[kind]:.0f} s" for kind, name in steps.items() if kind in first]
    yield f"It had come to: {', '.join(seen) or 'no process group, loader or model'}."
    for place in sorted(set(run.launch.stuck.values())):
        yield f"It stood at {place_in(place)}."
    if run.launch.ended == "time":
        yield "--seconds gives it more time; a smaller model or smaller data (--preload) need less."


def place_in(stuck: str) -> str:
    """Return "file:line in function" as seen from the present folder."""
    at, _, function = stuck.rpartition(" in ")
    return f"{place(at)} in {function}" if at else stuck


def as_json(runs: list[Run], diagnosis: Diagnosis, status: int) -> str:
    """Return the report for programs."""
    return json.dumps(
        {
            "status": status,
            "runs": [asdict(run.launch) for run in runs],
            "ranks": [run.world for run in runs],
            "updates": [max((len(rank.all("update")) for rank in run.ranks), default=0) for run in runs],
            "errors": [e for run in runs for _, e in errors(run)],
            "findings": [with_links(asdict(finding)) for finding in diagnosis.findings],
            "fine": diagnosis.fine,
            "unjudged": diagnosis.unjudged,
            "unused": diagnosis.unused,
            "broken": diagnosis.broken,
        },
        indent=1,
    )


def with_links(finding: dict[str, Any]) -> dict[str, Any]:
    """Return a finding, and what follows from it, with the addresses of the exercises."""
    consequences = [with_links(one) for one in finding["consequences"]]
    return finding | {"exercise_url": link_to(finding["exercise"]), "consequences": consequences}


def page(report: str, as_html: bool) -> str:
    """Return the report as a file to send to a colleague: HTML or Markdown."""
    if as_html:
        return f"<!doctype html><meta charset=utf-8><title>rankdoctor</title>\n<pre>\n{html.escape(report)}\n</pre>\n"
    return f"# What the doctor found\n\n```text\n{report}\n```\n"

"""The part of the campaign that strikes lesson 05, whose checkpoints have two forms, of which one can save in a thread.

Two ranks save often. They are killed at random moments and while they save, stopped by signals, run on a disk that is
too small, and find their latest checkpoint damaged when they resume.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from lives import Life, Tally

FORMS = {
    "whole": ["--checkpoint_form", "whole"],
    "sharded": ["--checkpoint_form", "sharded"],
    "sharded, async": ["--checkpoint_form", "sharded", "--async_save", "true"],
}
SHORT = ["--limit_train", 240, "--limit_val", 64, "--global_batch_size", 8, "--epochs", 3, "--save_interval", 5]
SHORT += ["--resume", "true", "--loader", "memory", "--vit_width", 32, "--vit_depth", 2]  # 30 steps an epoch
WAIT = 60.0
"""seconds that a life may take until it saves, or says that it has resumed"""


def temporary(run_dir: Path) -> Path:
    """Return where a run is saving, if it is saving."""
    sharded = run_dir / "checkpoint.tmp.sharded"
    return sharded if sharded.exists() else run_dir / "checkpoint.tmp"


def kill_some(life: Life, chance: random.Random, kill_one: Callable) -> tuple[str, bool]:
    """Kill one rank, which the others must name, or all of them."""
    if chance.random() < 0.5:
        return kill_one(life, chance)
    for process in life.processes:
        process.kill()
    return "kill -9 of all ranks", life.wait() is not None


def kill_while_saving(life: Life, run_dir: Path, chance: random.Random, kill_one: Callable) -> tuple[str, bool] | None:
    """Kill one rank or all of them once a checkpoint is being written; return None if the life ended before."""
    pause, end = chance.uniform(0, 0.04), time.monotonic() + WAIT
    while not temporary(run_dir).exists():
        if all(process.poll() is not None for process in life.processes) or time.monotonic() > end:
            return None
        time.sleep(0.0005)
    time.sleep(pause)
    saving = temporary(run_dir).exists()
    what, handled = kill_some(life, chance, kill_one)
    return f"{what}, {'while saving' if saving else 'just after saving'}", handled


def spoil_latest(run_dir: Path, chance: random.Random) -> str | None:
    """Zero 1,000 bytes of the latest checkpoint, shorten or remove a file of it; None if there is no earlier one."""
    for latest, before in (
        ("checkpoint.sharded", "checkpoint.previous.sharded"),
        ("checkpoint.pt", "checkpoint.previous.pt"),
    ):
        if not (run_dir / latest).exists() or not (run_dir / before).exists():
            continue
        path = run_dir / latest
        file = chance.choice(sorted(path.iterdir())) if path.is_dir() else path
        size = file.stat().st_size
        kinds = ["zeroed", "truncated", *(["removed"] if path.is_dir() else [])]
        kind = chance.choice(kinds)
        if kind == "removed":
            file.unlink()
        elif kind == "truncated":
            os.truncate(file, chance.randrange(size))
        else:
            content = bytearray(file.read_bytes())
            while bytes(content) == file.read_bytes():
                begin = chance.randrange(max(size - 1000, 1))
                content[begin : begin + 1000] = bytes(len(content[begin : begin + 1000]))
            file.write_bytes(content)
        return f"{file.relative_to(run_dir)} {kind}"
    return None


def damaged_between(tally: Tally, plan: object, times: int, chance: random.Random, kill_one: Callable) -> Tally:
    """Kill a run, spoil its latest checkpoint, resume it: it must say so, and continue from the one before."""
    plan.is_whole(plan.folder / "whole" / "run")
    run, struck = 0, 0
    life = None
    while True:
        run_dir = plan.folder / f"run{run}" / "run"
        life = life or plan.live(run_dir)
        if tally.times >= times or all(process.poll() is not None for process in life.processes):
            if life.wait() != [0] * len(life.processes) or not plan.is_whole(run_dir):
                tally.lost += max(struck, 1)
                tally.strange.append(f"{run_dir}: after {struck} damages, with another result\n{life.printed()}")
            run, struck, life = run + 1, 0, None
            if tally.times >= times:
                return tally
            continue
        time.sleep(chance.uniform(0.2, 0.8) * plan.seconds)
        if all(process.poll() is not None for process in life.processes):
            continue
        _, handled = kill_some(life, chance, kill_one)
        printed, life = life.printed(), None
        if not handled:
            tally.count(False, f"killed before damage\n{printed}")
            continue
        what = spoil_latest(run_dir, chance)
        if what is None:  # killed before the second save
            continue
        life = plan.live(run_dir)
        end = time.monotonic() + WAIT
        while "resumed from" not in life.printed() and time.monotonic() < end:
            if all(process.poll() is not None for process in life.processes):
                break
            time.sleep(0.01)
        lines = [line for line in life.printed().splitlines() if line.startswith("resumed from")]
        noticed = len(lines) == 1 and "checkpoint.previous." in lines[0] and "is damaged" in lines[0]
        tally.count(noticed, f"{what}\n{life.printed()}")
        struck += 1

"""Kill runs again and again at random moments, and see that each of them resumes and ends as if nothing had happened.

    make test-faults SEED=1 RUNS=20

A run of lesson 01 or 03 (whole checkpoints) or 05 (sharded ones, written at once or by a thread) has a fault in each of
its lives, chosen by the seed; its last life has none.

    step      kill -9 of one rank before a random step
    files     kill -9 of one rank before a random operation on a file of a checkpoint: it saves, loads or deletes one
    time      kill -9 of all ranks after a random time
    signal    SIGUSR1 to one rank before a random step (lessons 03 and 05): all save and stop, with status 0

The table says for each kind of run how many runs there were and how many faults they had, and of these runs, how many

    differed  ended with other weights, another optimizer state or other losses than a run without faults
    lost      began a life before a checkpoint that was surely complete: its save had returned before a log line that
              an earlier life had printed (with --async_save, the save after it had)
    failed    did not end with status 0 in their last life, or after a signal

Exit status 1 unless all of these are 0.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "tests", "data")]
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

from sources import collect, generate  # noqa: E402
from test_survive import LESSONS, STEPS, Lesson, assert_equal, final_state  # noqa: E402

FAULTS = 5
"""of each run"""
SAVES = [0, 4, 8, STEPS, STEPS + 4, STEPS + 8, 2 * STEPS]
"""the steps, counted over both epochs, after which runs save"""
RESUMED = re.compile(r"resumed from .*: epoch (\d), after step (\d+)")
STEP = re.compile(r"epoch (\d)  step +(\d+)/")


def fault(lesson: Lesson, chance: random.Random) -> tuple[object, ...]:
    """Return a random fault for with_fault.py."""
    rank = chance.randrange(lesson.ranks)
    kind = chance.choice(["step", "files", "time", *(["signal"] if lesson.ranks > 1 else [])])
    if kind == "files":
        return rank, "files", chance.randint(1, 60), "SIGKILL"
    if kind == "time":
        return "all", "seconds", round(chance.uniform(0, 5), 2), "SIGKILL"
    return rank, "workshop.log.Log.start_step", chance.randint(1, 13), "SIGUSR1" if kind == "signal" else "SIGKILL"


def surely_saved(log: str, behind: int) -> int:
    """Return the step of the newest checkpoint that is complete; it may be ``behind`` the last save."""
    steps = [(int(epoch) - 1) * STEPS + int(step) for epoch, step in STEP.findall(log)]
    saves = [step for step in SAVES if step < max(steps, default=0)]
    return saves[-behind] if len(saves) >= behind else 0


def run_with_faults(
    lesson: Lesson, folder: Path, environment: dict[str, str], chance: random.Random
) -> tuple[bool, bool]:
    """Let a run live and die; return whether a checkpoint was lost, and whether a life failed. The log is kept."""
    saved, lost, failed = 0, False, False
    for life in range(FAULTS + 1):
        what = fault(lesson, chance) if life < FAULTS else ()
        command = lesson.command(folder / "run", fault=what)
        done = subprocess.run(
            command,
            cwd=REPOSITORY / lesson.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log = done.stdout
        with (folder / "log.txt").open("a") as file:
            file.write(f"--- {' '.join(map(str, what)) or 'no fault'}: status {done.returncode}\n{log}")
        if begun := RESUMED.search(log):
            lost |= (int(begun[1]) - 1) * STEPS + int(begun[2]) < saved
        elif STEP.search(log):
            lost |= saved > 0
        saved = max(saved, surely_saved(log, behind=2 if "--async_save" in lesson.flags else 1))
        failed |= done.returncode != 0 and (not what or what[-1] == "SIGUSR1")
    return lost, failed


def main() -> None:
    """Run the campaign, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    root = Path(tempfile.mkdtemp(prefix="killed-often-"))
    generate("mnist", root / "data", train_samples=100, val_samples=20)
    collect(root / "data", REPOSITORY / "workshop")
    environment = os.environ | {"WORKSHOP_DATA": str(root / "data"), "WORKSHOP_RUNS": str(root / "runs")}
    table = {
        name: dict.fromkeys(("runs", "faults", "differed", "lost", "failed"), 0)
        for name in ("01", "03", "05", "05 async")
    }
    for name in table:
        whole = LESSONS[name].train(root / name / "whole", environment)
        assert whole.status == 0, whole.stderr
    for number in range(flags.runs):
        name = list(table)[number % len(table)]
        folder = root / name / str(number)
        folder.mkdir(parents=True)
        lost, failed = run_with_faults(LESSONS[name], folder, environment, chance)
        try:
            assert_equal(final_state(folder / "run"), final_state(root / name / "whole"))
            differed = False
        except (AssertionError, OSError, IndexError):
            differed = True
        found = {"runs": 1, "faults": FAULTS, "differed": differed, "lost": lost, "failed": failed}
        table[name] = {column: table[name][column] + int(value) for column, value in found.items()}
        bad = [column for column in ("differed", "lost", "failed") if found[column]]
        print(
            f"run {number + 1} of {flags.runs}, lesson {name}: {', '.join(bad) or 'as if nothing had happened'}",
            flush=True,
        )
        if bad:
            print(f"    see {folder}/log.txt")
        else:
            shutil.rmtree(folder)
    print(f"\n{'lesson':10}" + "".join(f"{column:>10}" for column in table["01"]))
    for name, row in table.items():
        print(f"{name:10}" + "".join(f"{value:10}" for value in row.values()))
    bad_runs = sum(row[column] for row in table.values() for column in ("differed", "lost", "failed"))
    if not bad_runs:
        shutil.rmtree(root)
    sys.stdout.flush()
    os._exit(min(bad_runs, 1))  # not by Python: libraries of torch would print what they have not freed


if __name__ == "__main__":
    main()

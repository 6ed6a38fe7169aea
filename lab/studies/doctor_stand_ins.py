"""Compare the doctor's two ways to do without a GPU: its stand-in, and PyTorch's own CUDA code on null GPUs.

    python lab/studies/doctor_stand_ins.py                        # the faulty scripts of all exercises: an hour or so
    python lab/studies/doctor_stand_ins.py held_out same_half     # some of them

Both get the same command. For each script: whether its fault is found, further findings, and the seconds. The study
needs the packages rankdoctor and nullgpu.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from clinic.catalogue import Exercise, exercises  # noqa: E402
from lab import results  # noqa: E402
from lab.studies.doctor_exercises import NOT_FOUND, diagnose, prepared_copy, row_of  # noqa: E402

WAYS = {"stand-in": (), "null GPU": ("--null_gpu",)}


def compared(exercise: Exercise, copy: Path) -> list[results.Cell]:
    """Return the row of an exercise: whether its fault is found, further findings, and seconds, for both ways."""
    row: list[results.Cell] = [f"`{exercise.name}`"]
    for flags in WAYS.values():
        report = diagnose(exercise, copy, "--json", *flags)
        _, _, found, _, others = row_of(exercise, report)
        updates = sum(report["updates"])
        row += [found if updates else "did not train", others, report["runs"][0]["seconds"]]
    row.append("yes" if row[1:3] == row[4:6] else "no")
    print(*row, sep=" | ", flush=True)
    return row


def main() -> None:
    """Compare on the exercises that are named, or on all."""
    wanted = [exercise for exercise in exercises() if exercise.name in sys.argv[1:] or not sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        copy = prepared_copy(Path(folder))
        rows = [compared(exercise, copy) for exercise in wanted]
    found = [sum(row[column] not in (NOT_FOUND, "did not train") for row in rows) for column in (1, 4)]
    results.store(
        "doctor_stand_ins",
        title=f"The doctor on {len(rows)} faulty scripts: {found[0]} faults found with the stand-in, {found[1]} with "
        "null GPUs",
        columns=["exercise", *(f"{what}, {way}" for way in WAYS for what in ("found", "others", "seconds")), "equal"],
        rows=rows,
        command="python lab/studies/doctor_stand_ins.py",
        finished=not sys.argv[1:],
    )


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}")

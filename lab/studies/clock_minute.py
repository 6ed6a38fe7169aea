"""What a simulated minute costs, with the clock before and after its second edition: seconds of this machine.

    git worktree add /tmp/former 13cb49a1a     # the last commit with the former clock
    python lab/studies/clock_minute.py /tmp/former

Until then, Python saw each operation of each update, and computed its duration while the host's time was taken. Since
then it sees the first updates only, and durations are looked up in C++. Both clocks run each loop in turn, on the same
machine, with the PyTorch of this environment; of each, the fastest of the rounds counts.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402
from lab.simulated import start  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402

GPU = "a100"
ROUNDS = 3
WORKLOADS, OTHERS, CHANGES = (f"lab/studies/clock_{name}.py" for name in ("workloads", "others", "changes"))
LOOPS = {
    "a small network, a batch of 64": (CHANGES, "small"),
    "a small network, a batch of 512": (CHANGES, "plain"),
    "MobileNetV3, fp32, 128 images": (OTHERS, "mobilenet"),
    "ResNet-152, fp16, 64 images": (OTHERS, "resnet152"),
    "DenseNet-121, fp16, 64 images": (OTHERS, "densenet121"),
    "GPT-2 124M, bf16, 12 x 1,024 tokens": (WORKLOADS, "gpt2", "fast"),
}


def run(project: Path, *words: str) -> tuple[float, float, float]:
    """Run a loop with the null GPU of this folder.

    Returns:
        Simulated milliseconds of an update, seconds that a simulated minute took, and milliseconds that an update took.

    Raises:
        UserError: the loop failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch, "figures.json")
        command = [*start(GPU), "--json", str(figures), sys.executable, *words]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (project / "src", REPOSITORY)))}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        ranks = json.loads(figures.read_text())["clock"]["ranks"] if figures.exists() else []
    if not ranks or "seconds" not in ranks[0]:
        raise UserError(f"{project}: {' '.join(words)}: {done.stderr[-1500:]}")
    minute = 60 * ranks[0]["real"] / ranks[0]["simulated"]
    return 1e3 * ranks[0]["seconds"], minute, 1e3 * ranks[0]["seconds"] * minute / 60


def main() -> None:
    """Run all loops with both clocks, and store the table.

    Raises:
        UserError: the folder of the former clock was not given, or has none.
    """
    if len(sys.argv) != 2 or not Path(sys.argv[1], "tools/nullgpu/src/nullgpu").is_dir():
        raise UserError("name the folder of a checkout with the former clock: git worktree add FOLDER 13cb49a1a")
    projects = Path(sys.argv[1]).resolve() / "tools/nullgpu", REPOSITORY / "tools/nullgpu"
    rows: list[list[results.Cell]] = []
    for name, words in LOOPS.items():
        rounds = [[run(project, *words) for project in projects] for _ in range(ROUNDS)]
        before, now = (min((one[i] for one in rounds), key=lambda found: found[2]) for i in range(2))
        rows.append([name, before[0], now[0], before[1], now[1], before[2], now[2], before[2] / now[2]])
        print(*rows[-1], sep=" | ", flush=True)
    store(rows)


def store(rows: list[list[results.Cell]]) -> None:
    """Store the table."""
    milliseconds = ("simulated ms: before", "simulated ms: now", "real ms: before", "real ms: now")
    results.store(
        "clock_minute",
        title="What a simulated minute costs, before and after the durations are looked up in C++",
        columns=[
            "loop",
            *milliseconds[:2],
            "s for a simulated minute: before",
            "s for a simulated minute: now",
            *milliseconds[2:],
            "times as fast",
        ],
        rows=rows,
        formats={name: ",.1f" for name in milliseconds}
        | {f"s for a simulated minute: {when}": ".0f" for when in ("before", "now")}
        | {"times as fast": ".1f"},
        unit="ms of an update on a simulated A100",
        spread=f"the fastest of {ROUNDS} rounds in turn",
        command="python lab/studies/clock_minute.py FORMER",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)

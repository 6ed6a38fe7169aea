"""How far the clock can be trusted: simulated trainings beside the same trainings on an H200.

    python lab/studies/clock_h200.py          # all: some minutes
    python lab/studies/clock_h200.py ResNet   # those with this word in their name

None of these trainings was used to fit the clock's curves (lab/studies/clock_fit.py).
"""

import json
import sys
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402
from lab.simulated import simulate  # noqa: E402
from workshop.errors import run_reporting_user_errors  # noqa: E402

MEASURED = REPOSITORY / "results/nvidia_h200_1gpu/trainings.json"
MINUTE = "s for a simulated minute"
WORKLOADS, CHANGES = "lab/studies/clock_workloads.py", "lab/studies/clock_changes.py"
COMMANDS = {
    "ResNet-50, TF32, 256 images": (WORKLOADS, "resnet50", "tf32"),
    "GPT-2 124M, bf16, 12 x 1,024 tokens": (WORKLOADS, "gpt2", "fast"),
    "ViT, TF32, 16 samples": (WORKLOADS, "vit", "tf32"),
    "U-Net 3-D, TF32, 64 cubes": (WORKLOADS, "unet", "tf32"),
    "U-Net 3-D, fp32, 64 cubes": (WORKLOADS, "unet", "fp32"),
    "pinned memory, non_blocking copies": (CHANGES, "plain"),
    "loss.item() in each step": (CHANGES, "item"),
    "pageable memory": (CHANGES, "pageable"),
    "a CUDA graph": (CHANGES, "graph"),
    "a batch of 64": (CHANGES, "small"),
    "a batch of 64 and a CUDA graph": (CHANGES, "small graph"),
}
HOST_LIMITS = ("loss.item() in each step", "pageable memory", "a batch of 64")
"""trainings in which the GPU waited on the H200; with these, its own time was not measured"""


def main() -> None:
    """Run the trainings, and store the table if it was all of them."""
    table = json.loads(MEASURED.read_text())
    measured = {row[0]: row[1] for row in table["rows"]}
    wanted = [name for name in COMMANDS if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    rows: list[list[results.Cell]] = []
    errors = []
    for name in wanted:
        found = simulate("h200", "python", *COMMANDS[name])
        gpu = found.milliseconds * found.busy
        ratio = None if name in HOST_LIMITS else gpu / measured[name]
        rows.append(
            [name, measured[name], found.milliseconds, gpu, ratio, found.busy, found.minute, found.waits_in_words]
        )
        if ratio:
            errors.append(max(ratio, 1 / ratio))
        print(*rows[-1], sep=" | ", flush=True)
    wrong = f"wrong by a factor of {median(errors):.2f} in the median, {max(errors):.2f} at most" if errors else ""
    results.store(
        "clock_h200",
        title=f"A simulated H200 beside an H200 (the time of the GPU: {wrong})",
        columns=["training", "measured", "simulated", "its GPU alone", "ratio", "GPU busy", MINUTE, "it waits for"],
        rows=rows,
        formats={
            "measured": ",.2f",
            "simulated": ",.2f",
            "its GPU alone": ",.2f",
            "ratio": ".2f",
            "GPU busy": ".0%",
            MINUTE: ",.0f",
        },
        unit="ms per update",
        spread="ratio: its GPU alone to measured, where the GPU limited the H200, too; the host is this machine's",
        command="python lab/studies/clock_h200.py",
        finished=not sys.argv[1:],
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)

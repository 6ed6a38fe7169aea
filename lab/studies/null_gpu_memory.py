"""The memory of large trainings on a null GPU, beside the same trainings on an H200.

    python lab/studies/null_gpu_memory.py     # two minutes; no GPU needed

The figures of the H200 are in results/nvidia_h200_1gpu/large_trainings.json; the null GPU's are put beside them there.
Use the PyTorch that the H200 had, 2.11: it says how large the workspaces of cuBLAS are, and how long they stay.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab.simulated import null_gpu  # noqa: E402

TABLE = REPOSITORY / "results/nvidia_h200_1gpu/large_trainings.json"
TRAININGS = {
    "ResNet-50, TF32, 256 images": "resnet50 tf32",
    "GPT-2 124M, bf16, 12 x 1,024 tokens": "gpt2 fast",
    "ViT, TF32, 16 samples": "vit tf32",
    "U-Net 3-D, TF32, 64 cubes": "unet tf32",
    "U-Net 3-D, fp32, 64 cubes": "unet fp32",
}


def memory_of(name: str) -> tuple[float, float]:
    """Return the GB that a training has in use at its peak on a null GPU, and those that are reserved."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        options = ("--sm", 90, "--gb", 140, "--report", "--snapshot", Path(folder, "memory.pickle"), "--json", figures)
        command = [*null_gpu(*options), "python", "lab/studies/clock_workloads.py", *name.split()]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        rank = json.loads(figures.read_text())["report"]["ranks"][0]
    return rank["peak"] / 1e9, rank["reserved"] / 1e9


def main() -> None:
    """Run the trainings, and write the figures of the null GPU."""
    table = json.loads(TABLE.read_text())
    at = {name: i for i, name in enumerate(table["columns"])}
    for row in table["rows"]:
        if row[0] not in TRAININGS:
            continue
        peak, reserved = memory_of(TRAININGS[row[0]])
        row[at["peak: null GPU"]], row[at["reserved: null GPU"]] = peak, reserved
        row[at["null GPU / H200"]] = peak / row[at["peak: H200"]]
        print(row[0], f"{peak:.3f} GB, of an H200's {row[at['peak: H200']]:.3f}", sep=": ", flush=True)
    TABLE.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()

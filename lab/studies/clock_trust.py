"""How far the clock can be trusted: simulated speeds beside published ones.

    python lab/studies/clock_trust.py            # all: some minutes
    python lab/studies/clock_trust.py resnet50   # those with this word in their name

None of them was used to fit the clock's curves (lab/studies/clock_fit.py).
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402
from lab.simulated import simulate  # noqa: E402
from workshop.errors import run_reporting_user_errors  # noqa: E402

MINUTE = "s for a simulated minute"
WORKLOADS = "lab/studies/clock_workloads.py"
NERSC = "NERSC, Deep Learning at Scale (SC22), log of its README"
NVIDIA = "NVIDIA DeepLearningExamples, ResNet50 v1.5, README (container 21.03)"
NERSC_VIT = "NERSC, Deep Learning at Scale (SC24), logs of its README, with DALI; NVIDIA's container, which allows TF32"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
FLOP_PER_TOKEN = 6 * 6.6e9 + 12 * 32 * 4096 * 8192
"""of gpt_7b with sequences of 8,192 tokens: PaLM (https://arxiv.org/abs/2204.02311), appendix B"""
LESSON_05 = (
    "05_fully_sharded/train.py --model gpt_7b --sequence_length 8192 --batch_size 1 --precision bf16 --num_workers 0 "
    "--activation_checkpointing true --limit_val 160 --epochs 1 --log_interval 1000"
)


@dataclass
class Case:
    """A training whose speed was published."""

    name: str
    published: float
    unit: str
    per_update: float
    """units of an update; the simulated speed is this divided by its seconds"""
    command: str
    source: str
    gpu: str = "a100"
    ranks: int = 0


CASES = [
    Case("ResNet-50, TF32", 938, "images/s", 256, f"{WORKLOADS} resnet50 tf32", NVIDIA),
    Case(
        "GPT-2 124M, attention that stores its scores",
        12 * 1024 / 0.250,
        "tokens/s",
        12 * 1024,
        f"{WORKLOADS} gpt2 slow",
        "nanoGPT, README (about 250 ms for an update; batch of 12 sequences assumed)",
    ),
    Case("ResNet-50, mixed precision", 2470, "images/s", 256, f"{WORKLOADS} resnet50 amp", NVIDIA),
    Case("U-Net 3-D, TF32", 395, "samples/s", 64, f"{WORKLOADS} unet tf32", NERSC),
    Case("U-Net 3-D, fp32", 133, "samples/s", 64, f"{WORKLOADS} unet fp32", NERSC),
    Case("U-Net 3-D, mixed precision", 513, "samples/s", 64, f"{WORKLOADS} unet amp_benchmark", NERSC),
    Case(
        "GPT-2 124M, compiled, fast attention",
        12 * 1024 / 0.135,
        "tokens/s",
        12 * 1024,
        f"{WORKLOADS} gpt2 compiled",
        "nanoGPT, README (135 ms for an update)",
    ),
    Case("ViT, TF32", 13.2, "samples/s", 16, f"{WORKLOADS} vit tf32", NERSC_VIT),
    Case("ViT, fp32", 10.1, "samples/s", 16, f"{WORKLOADS} vit fp32", NERSC_VIT),
    Case("ViT, mixed precision", 53.7, "samples/s", 16, f"{WORKLOADS} vit amp", NERSC_VIT),
    Case(
        "Llama 8B as gpt_7b, FSDP on 8 GPUs",
        33,
        "% MFU",
        8192 * FLOP_PER_TOKEN / 989e12 * 100,
        f"{LESSON_05} --limit_train 96",
        TITAN,
        "h100",
        8,
    ),
    Case(
        "Llama 8B as gpt_7b, FSDP on 120 GPUs (128)",
        33 * 5605 / 5762,
        "% MFU",
        8192 * FLOP_PER_TOKEN / 989e12 * 100,
        f"{LESSON_05} --limit_train 1440",
        TITAN,
        "h100",
        120,
    ),
]


def main() -> None:
    """Run the cases, and store the table if it was all of them."""
    wanted = [case for case in CASES if not sys.argv[1:] or any(word in case.name for word in sys.argv[1:])]
    subprocess.run([sys.executable, "data/prepare.py", "text"], cwd=REPOSITORY, check=True)  # for lesson 05
    rows: list[list[results.Cell]] = []
    errors: list[float] = []
    for case in wanted:
        found = simulate(case.gpu, "python", *case.command.split(), gpus=min(case.ranks, 8) or 1, world=case.ranks)
        speed = case.per_update / (found.milliseconds / 1e3)
        ratio = speed / case.published
        errors.append(max(ratio, 1 / ratio))
        rows.append([case.name, case.unit, case.published, speed, ratio, found.busy, found.minute, case.source])
        print(*rows[-1], sep=" | ", flush=True)
    wrong = f"wrong by a factor of {median(errors):.2f} in the median, {max(errors):.2f} at most"
    results.store(
        "clock_trust",
        title=f"The clock beside published speeds ({wrong})",
        columns=["training", "unit", "published", "simulated", "ratio", "GPU busy", MINUTE, "source"],
        rows=rows,
        formats={"published": ",.0f", "simulated": ",.0f", "ratio": ".2f", "GPU busy": ".0%", MINUTE: ",.0f"},
        command="python lab/studies/clock_trust.py",
        finished=not sys.argv[1:],
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)

"""A blind test of the clock: trainings are predicted for a GPU, and then compared with what that GPU measures.

    python lab/studies/clock_blind.py predict h100 predicted.json        # here; half an hour on an idle machine
    python lab/studies/gpu_trainings.py --folder DIR                     # on the GPU
    python lab/studies/clock_blind.py compare DIR/trainings.json predicted.json

What is predicted: the milliseconds of an update, those in which the GPU computes, and what limits the training. With
--host 2 the host counts as twice as fast as this machine's.
"""

import sys
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "lab/studies")]

from lab import results  # noqa: E402
from lab.flags import Parser  # noqa: E402
from lab.simulated import simulate  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402
from workshop.jsonfile import read_json, write_json  # noqa: E402

NAMES = {
    "changes plain": "a small CNN, 512 images",
    "changes item": "the same, loss.item()",
    "changes pageable": "the same, pageable memory",
    "changes graph": "the same, a CUDA graph",
    "changes small": "the same, 64 images",
    "changes small graph": "the same, 64 images, a graph",
    "resnet50 tf32": "ResNet-50, TF32, 256 images",
    "resnet50 amp": "ResNet-50, fp16, channels last",
    "gpt2 slow": "GPT-2, bf16, attention of its own",
    "gpt2 fast": "GPT-2, bf16",
    "gpt2 compiled": "GPT-2, bf16, compiled",
    "unet tf32": "U-Net 3-D, TF32",
    "unet fp32": "U-Net 3-D, fp32",
    "unet amp": "U-Net 3-D, fp16",
    "vit tf32": "weather ViT, TF32",
    "vit fp32": "weather ViT, fp32",
    "vit amp": "weather ViT, bf16",
    "resnet152": "ResNet-152, fp16, 64 images",
    "densenet121": "DenseNet-121, fp16, 64 images",
    "mobilenet": "MobileNetV3, fp32, 128 images",
    "convnext": "ConvNeXt, bf16, channels last",
    "swin": "Swin, bf16, 64 images",
    "bert": "BERT, bf16, 32 x 512, padding mask",
    "llama": "Llama of 0.25 billion, bf16, 8 x 2,048",
    "diffusion": "diffusion U-Net, bf16, 64 images",
    "lstm": "LSTM, fp32, 64 x 256",
    "fourier": "Fourier operator, fp32, 32 fields",
    "graph": "graph network, fp32, 640,000 edges",
    "recommender": "recommender, fp32, 26 tables",
    "table": "perceptron, fp32, 4,096 rows",
}
"""the titles in trainings.json, and what they train"""


def command_of(title: str) -> list[str]:
    """Return the words that run a training."""
    first, *option = title.split()
    study = {"changes": "changes", "resnet50": "workloads", "gpt2": "workloads"} | {
        "unet": "workloads",
        "vit": "workloads",
    }
    words = [] if first == "changes" else [first]
    option = [" ".join(option)] if option else []
    return [sys.executable, f"lab/studies/clock_{study.get(first, 'others')}.py", *words, *option]


def predict(gpu: str, out: Path, only: str, host: float) -> None:
    """Simulate what is missing in the file."""
    found: dict[str, Any] = read_json(out)
    for title in NAMES:
        if only not in title or title in found:
            continue
        try:
            it = simulate(gpu, *command_of(title), host=host)
            found[title] = {"ms": it.milliseconds, "busy": it.busy, "waits": it.waits, "minute": it.minute}
            print(f"{NAMES[title]:40} {it.milliseconds:9.2f} ms, GPU {it.busy:.0%}, {it.waits_in_words}", flush=True)
        except UserError as error:
            print(f"{NAMES[title]:40} {str(error)[-400:]}", flush=True)
            found[title] = {"error": str(error)[-400:]}
        write_json(out, found)


def compare(measured: Path, predicted: Path) -> None:
    """Store the table of both."""
    real, found = read_json(measured), read_json(predicted)
    rows: list[list[results.Cell]] = []
    errors, host_bound = [], 0
    for row in real["rows"]:
        it = found.get(row["name"], {})
        if "ms" not in row or "ms" not in it:
            continue
        gpu = it["ms"] * it["busy"]
        computed = row["total_us"] / 1e3 / row["profiled_updates"] if "total_us" in row else None
        busy = min(1.0, computed / row["ms"]) if computed else None
        limited = busy is not None and busy < 0.9
        ratio = gpu / (computed if limited else row["ms"])  # type: ignore[operator]
        host_bound += limited
        errors.append(abs(log(ratio)))
        rows.append([NAMES[row["name"]], row["ms"], busy, it["ms"], gpu, ratio])
    results.store(
        "clock_blind",
        title=f"Predicted for the {real['gpu']}, then measured (the time of the GPU: wrong by a factor of "
        f"{exp(median(errors)):.2f} in the median, {exp(max(errors)):.2f} at most)",
        columns=["training", "measured", "GPU busy", "simulated", "its GPU alone", "ratio"],
        rows=rows,
        formats={"measured": ",.2f", "GPU busy": ".0%", "simulated": ",.2f", "its GPU alone": ",.2f", "ratio": ".2f"},
        unit="ms per update",
        spread="GPU busy: of the GPU's time, its kernels in a profile; ratio: the simulated GPU's time to the measured "
        "time or, where the GPU was busy for less than 90 %, to that of its kernels",
        command="python lab/studies/clock_blind.py compare DIR/trainings.json predicted.json",
    )


def main() -> None:
    """Predict or compare."""
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("predict", "compare"))
    parser.add_argument("first", help="the simulated GPU, or trainings.json of the real one")
    parser.add_argument("predicted", type=Path, help="file of the predictions")
    parser.add_argument("--only", default="", metavar="WORD", help="predict those with this word")
    parser.add_argument("--host", type=float, default=1.0, help="how much faster the host is than this one")
    arguments = parser.parse_args()
    if arguments.what == "predict":
        predict(arguments.first, arguments.predicted, arguments.only, arguments.host)
    else:
        compare(Path(arguments.first), arguments.predicted)


if __name__ == "__main__":
    run_reporting_user_errors(main)

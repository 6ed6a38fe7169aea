"""A blind test of the clock: trainings are predicted for a GPU, and then compared with what that GPU measures.

    python lab/studies/clock_blind.py predict h100 predicted.json        # here; half an hour on an idle machine
    python lab/studies/gpu_trainings.py --folder DIR --traces TRACES      # on the GPU
    python lab/studies/gpu_traces.py TRACES --folder DIR                  # adds the time of the kernels
    python lab/studies/clock_blind.py compare DIR/trainings.json predicted.json now.json

The first predictions are made before the clock is changed with what was measured; now.json are those of today's clock.
With --host 2 the host counts as twice as fast as this machine's.
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


def compare(measured: Path, first: Path, now: Path) -> None:
    """Store the table of the trainings whose kernels were timed, of their blind predictions and of today's."""
    blind, known = read_json(first), read_json(now)
    real = read_json(measured)
    rows: list[list[results.Cell]] = []
    errors: dict[str, list[float]] = {"blind": [], "now": [], "tests": []}
    for row in real["rows"]:
        name = row["name"]
        if "kernels_ms" not in row or "ms" not in blind.get(name, {}):
            continue
        kernels, cells = row["kernels_ms"], list[results.Cell]()
        for kind, found in (("blind", blind), ("now", known)):
            ratio = found[name]["ms"] * found[name]["busy"] / kernels if name in found else None
            cells.append(ratio)
            if ratio:
                errors[kind].append(abs(log(ratio)))
                if kind == "now" and name not in USED:
                    errors["tests"].append(abs(log(ratio)))
        limit = "GPU" if kernels > GPU_LIMITS * row["ms"] else "host"
        rows.append([NAMES[name], row["ms"], kernels, limit, *cells, "yes" if name in USED else ""])
    rows += [
        [f"wrong by, {name}", None, None, "", *(exp(of(errors[kind])) for kind in ("blind", kind_now)), ""]
        for name, of, kind_now in (
            ("median", median, "now"),
            ("at most", max, "now"),
            ("median without those fitted to", median, "tests"),
        )
    ]
    results.store(
        "clock_blind",
        title=f"The kernels' time of trainings, predicted for the {real['gpu']}",
        columns=["training", "measured", "its kernels", "limited by", "blind", "now", "fitted to it"],
        rows=rows,
        formats={"measured": ",.1f", "its kernels": ",.1f", "blind": ".2f", "now": ".2f"},
        unit="ms per update",
        spread="blind and now: simulated divided by measured; fitted to it: some of its operations, afterwards",
        command="python lab/studies/clock_blind.py compare trainings.json blind.json now.json",
    )


USED = ("resnet152", "convnext", "llama", "graph", "fourier")
"""trainings some of whose operations clock_fit.py uses, since they were measured"""
GPU_LIMITS = 0.94
"""share of an update in which the kernels run, if the GPU is the limit"""


def main() -> None:
    """Predict or compare."""
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("predict", "compare"))
    parser.add_argument("first", help="the simulated GPU, or trainings.json of the real one")
    parser.add_argument("predicted", type=Path, help="file of the predictions")
    parser.add_argument("now", type=Path, nargs="?", help="file of the predictions of today's clock, with compare")
    parser.add_argument("--only", default="", metavar="WORD", help="predict those with this word")
    parser.add_argument("--host", type=float, default=1.0, help="how much faster the host is than this one")
    arguments = parser.parse_args()
    if arguments.what == "predict":
        predict(arguments.first, arguments.predicted, arguments.only, arguments.host)
    else:
        compare(Path(arguments.first), arguments.predicted, arguments.now or arguments.predicted)


if __name__ == "__main__":
    run_reporting_user_errors(main)

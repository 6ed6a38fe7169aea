"""What share of the vendor's peak NERSC's published throughputs of the U-Net are, computed here: no GPU is needed.

    python experiments/published_mfu.py

You should see that a faster number format makes the training faster, and yet uses a smaller share of its own peak.
"""

from functools import partial

from lab import results
from lab.flags import Parser
from workshop.errors import run_reporting_user_errors
from workshop.models.unet3d import IN_CHANNELS, UNet3D
from workshop.profiling.mfu import model_flops

PEAKS = {"fp32": 19.5, "TF32": 156.0, "fp16": 312.0}
"""10^12 operations per second that an A100 can make at most, from NVIDIA's data sheet, without sparsity"""
PUBLISHED = {
    "fp32, TF32 switched off": (133, "fp32"),
    "TF32": (395, "TF32"),
    "mixed precision in fp16": (513, "fp16"),
    "and a fused optimizer": (534, "fp16"),
    "and compilation": (542, "fp16"),
}
"""samples/s in the last epoch of a run, from the README of https://github.com/NERSC/sc22-dl-tutorial, and the format"""


def main() -> None:
    """Count the operations of the model, and store the table."""
    Parser(__doc__).parse_args()
    flops = model_flops(partial(UNet3D, width=64, depth=6), (IN_CHANNELS, 64, 64, 64))
    rows: list[list[results.Cell]] = []
    for name, (speed, form) in PUBLISHED.items():
        rows.append([name, speed, PEAKS[form], speed * flops / PEAKS[form] / 1e12])
    results.store(
        "published_mfu",
        title="Published throughputs of the U-Net, as a share of the vendor's peak",
        columns=["what was changed", "samples/s", "peak, TFLOP/s", "MFU"],
        rows=rows,
        formats={"MFU": ".0%"},
        spread=f"NERSC's samples/s on an A100, times {flops / 1e9:.1f} GFLOP per sample, over NVIDIA's peak; computed",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)

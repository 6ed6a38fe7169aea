"""The fastest matrix product in each number format, and what sizes that are no multiple of 8 cost.

    python experiments/tensor_cores.py

On a GPU with tensor cores you should see that 16 bits have several times the peak of float32, and that matrices of
4,096 rows are multiplied faster than those of 4,095 or 4,097 in 16 bits. A CPU has no tensor cores, so it shows the
peak only.
"""

from pathlib import Path

import torch

from lab import results
from lab.flags import Parser
from lab.launching import load_script
from lab.timing import measure
from workshop.checks import choose_precision
from workshop.errors import UserError, run_reporting_user_errors
from workshop.profiling.mfu import DTYPES, peak_flops_per_second

LESSON = load_script(Path(__file__).resolve().parents[1])
SIZES = (4095, 4096, 4097, 4104)
"""rows and columns of the matrices on a GPU: two are multiples of 8"""
PRODUCTS = 10
"""that are launched before the CPU waits for them"""


def tflops(size: int, precision: str, device: torch.device) -> float:
    """Return the 10^12 operations per second of products of square matrices; the median trial counts."""
    dtype = DTYPES.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def products() -> None:
        for _ in range(PRODUCTS):
            left @ right
        torch.accelerator.synchronize()

    products()  # libraries are loaded, algorithms chosen
    return PRODUCTS * 2 * size**3 / measure(products, min_seconds=0.3).seconds / 1e12


def main() -> None:
    """Measure each format, and store the table."""
    Parser(__doc__).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = SIZES if device.type == "cuda" else ()
    digits = ",.0f" if device.type == "cuda" else ".2g"
    rows: list[list[results.Cell]] = []
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        try:
            choose_precision(precision, device)
        except UserError as error:
            print(f"{precision}: not measured: {error}")
            continue
        LESSON.set_precision(precision, cudnn_benchmark=False)
        peak = peak_flops_per_second(precision, device) / 1e12
        rows.append([precision, peak, *(tflops(size, precision, device) for size in sizes)])
    columns = ["", "peak", *(f"{size:,}" for size in sizes)]
    results.store(
        "tensor_cores",
        title="Matrix products in each number format",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(columns[1:], digits),
        unit="TFLOP/s",
        spread="the peak is the fastest product of large square matrices"
        + (", the others are medians, by the number of rows" if sizes else ""),
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)

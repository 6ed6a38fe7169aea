"""What each number format can hold: its range, its digits, and what is left of some numbers in it.

    python experiments/number_formats.py

You should see that fp16 has a small range and bf16 few digits: 70,000 is infinite in fp16, and 256 + 1 is 256 in bf16.
The two formats of 8 bits have so little of both that they are used with a scale for each tensor only. All of this
follows from the formats, so every machine prints the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lab.flags import Parser
from lab.results import as_text
from workshop.errors import run_reporting_user_errors

STORED = {"0.1": 0.1, "256 + 1": 257.0, "2,048 + 1": 2049.0, "70,000": 70_000.0, "0.00000001": 1e-8}
"""numbers that are rounded to each format, as they are shown"""


@dataclass(frozen=True)
class NumberFormat:
    """A format of floating-point numbers."""

    name: str
    bits: int
    significant_bits: int
    """of a number, with the first one, which is always 1 and therefore not stored"""
    largest: float
    smallest_normal: float
    """below it, numbers have fewer significant bits"""
    rounded: Callable[[torch.Tensor], torch.Tensor]
    """what is stored of float32 numbers, as float32"""

    @property
    def after_one(self) -> float:
        """Return the distance from 1 to the next number."""
        return 2.0 ** (1 - self.significant_bits)

    @property
    def smallest(self) -> float:
        """Return the smallest number above zero."""
        return self.smallest_normal * self.after_one


def of_torch(name: str, dtype: torch.dtype) -> NumberFormat:
    """Return the description of a format that PyTorch has."""
    info = torch.finfo(dtype)
    return NumberFormat(
        name=name,
        bits=info.bits,
        significant_bits=1 - round(math.log2(info.eps)),
        largest=info.max,
        smallest_normal=info.smallest_normal,
        rounded=lambda numbers: numbers.to(dtype).float(),
    )


def rounded_to_tf32(numbers: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers to the nearest ones of 11 significant bits; of two that are as near, to the even one."""
    dropped = 24 - 11
    bits = numbers.view(torch.int32)
    odd = (bits >> dropped) & 1
    half = (1 << (dropped - 1)) - 1
    return ((bits + half + odd) >> dropped << dropped).view(torch.float32)


FP32 = of_torch("fp32", torch.float32)
TF32 = NumberFormat("tf32", 19, 11, (2 - 2.0**-10) * 2.0**127, FP32.smallest_normal, rounded_to_tf32)
"""no format for storing numbers: float32 numbers are rounded to it when they are multiplied"""
FORMATS = (FP32, TF32, of_torch("fp16", torch.float16), of_torch("bf16", torch.bfloat16))
FP8 = (of_torch("fp8 e5m2", torch.float8_e5m2), of_torch("fp8 e4m3", torch.float8_e4m3fn))


def main() -> None:
    """Print both tables."""
    Parser(__doc__).parse_args()
    limits = [
        [
            form.name,
            str(form.bits),
            str(form.significant_bits),
            f"{form.largest:,.0f}" if form.largest < 1e6 else f"{form.largest:.2g}",
            f"{form.smallest_normal:.2g}",
            f"{form.smallest:.2g}",
            f"1 + {form.after_one:.2g}",
        ]
        for form in (*FORMATS, *FP8)
    ]
    header = ["", "bits", "significant", "largest", "smallest normal", "smallest above 0", "after 1 comes"]
    print(as_text({"columns": header, "rows": limits, "formats": {}}))
    numbers = torch.tensor(list(STORED.values()))
    stored = [[form.name, *(f"{number:.5g}" for number in form.rounded(numbers).tolist())] for form in FORMATS]
    print("\nwhat is left of some numbers:\n")
    print(as_text({"columns": ["", *STORED], "rows": stored, "formats": {}}))


if __name__ == "__main__":
    run_reporting_user_errors(main)

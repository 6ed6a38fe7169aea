"""What number_formats.py of lesson 04 says of the formats is what PyTorch does, and what the page shows."""

import pytest
import torch

from conftest import Script
from number_formats import FORMATS, TF32, NumberFormat, rounded_to_tf32

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("form", [form for form in FORMATS if form is not TF32], ids=lambda form: form.name)
def test_the_limits_are_those_of_the_format(form: NumberFormat) -> None:
    dtype = DTYPES[form.name]
    one = torch.tensor(1.0, dtype=dtype)
    assert (one + form.after_one) - one == form.after_one
    assert one + form.after_one / 2 == one
    double = torch.tensor([form.smallest, form.smallest / 2, form.largest], dtype=torch.float64)
    smallest, zero, largest = double.to(dtype).double()
    assert (smallest, zero, largest) == (form.smallest, 0, form.largest)


def test_tf32_has_the_digits_of_fp16_and_the_range_of_bf16() -> None:
    numbers = torch.linspace(-3, 3, 1000)  # none of them so small that fp16 has fewer digits for it
    assert torch.equal(rounded_to_tf32(numbers), numbers.half().float())
    assert rounded_to_tf32(torch.tensor([70_000.0, -1e-8])).tolist() == pytest.approx([70_000, -1e-8], rel=2**-11)
    fp32, tf32, fp16, bf16 = FORMATS
    assert (tf32.significant_bits, tf32.smallest_normal) == (fp16.significant_bits, bf16.smallest_normal)
    assert fp32.bits == 2 * fp16.bits == 2 * bf16.bits


def test_the_tables_are_printed(run_script: Script) -> None:
    result = run_script("04_mixed_precision/experiments/number_formats.py")
    assert result.status == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["fp16", "0.099976", "257", "2048", "inf", "0"] in rows
    assert ["bf16", "0.1001", "256", "2048", "70144", "1.0012e-08"] in rows

"""Where there can be no null GPU, the tests of this folder are skipped."""

import os
import shutil

import pytest
import torch


def skip_if_impossible() -> None:
    """Skip the module that calls this, if PyTorch has no CUDA or there is no compiler."""
    reason = ""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA, so it has no code for a null GPU to run"
    elif shutil.which(os.environ.get("CXX", "g++")) is None:
        reason = "the null GPU is compiled at its first use, and there is no C++ compiler (g++)"
    if reason:
        pytest.skip(f"tests/nullgpu: {reason}", allow_module_level=True)

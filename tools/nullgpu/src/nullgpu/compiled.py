"""Compiled code under the clock: a kernel of Triton, as torch.compile makes them, takes the time of its memory traffic.

Products and convolutions that the compiler leaves to cuBLAS and cuDNN are operations like any other: see clock.py.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

Put = Callable[[str, float, bool, Callable[[], Any]], Any]
"""called with a kernel's name, the bytes that it moves, whether it computes products, and what launches it"""
observing = False
restore: list[Callable[[], None]] = []
TEMPLATE = "triton_tem_"
"""how the compiler names kernels for products and attention"""


def install(put: Put) -> None:
    """Call ``put`` for each launch of a kernel that torch.compile has made."""
    global observing
    observing = True
    own = torch.compile

    @functools.wraps(own)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        observe(put)  # imports Triton, so not before it is needed
        return own(*args, **kwargs)

    torch.compile = compile_


@functools.cache
def observe(put: Put) -> None:
    """Let the launcher of these kernels call ``put``."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    # The compiler would time its candidates, which are all the same here: it takes the first one.
    CachingAutotuner.bench = lambda self, launcher, *args, **kwargs: 1.0
    if not observing:
        return
    own = CachingAutotuner.run
    restore.append(lambda: setattr(CachingAutotuner, "run", own))

    @functools.wraps(own)
    def run(self: Any, *args: Any, stream: int, benchmark_run: bool = False, **kwargs: Any) -> Any:
        def launch() -> Any:
            return own(self, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)

        if benchmark_run:
            return launch()
        name = self.fn.__name__
        return put(name, moved(dict(zip(self.triton_meta["signature"], args, strict=False))), TEMPLATE in name, launch)

    CachingAutotuner.run = run


def stop() -> None:
    """Do not call it any more."""
    global observing
    observing = False
    while restore:
        restore.pop()()


def moved(arguments: Mapping[str, Any]) -> float:
    """Return the bytes that a kernel reads and writes, from its arguments by the compiler's names.

    It has a thread, or a step of a loop, for each of xnumel x ynumel x r0_numel ... elements, so it cannot touch more
    of an argument. What it changes in place (in_out_ptr0) is read and written.
    """
    elements = prod(value for name, value in arguments.items() if name.endswith("numel"))
    total = 0.0
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            times = 2 if name.startswith("in_out") else 1
            total += times * min(value.numel(), elements) * value.element_size()
    return total

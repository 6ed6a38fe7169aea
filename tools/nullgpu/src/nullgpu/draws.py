"""Random numbers of the GPU, drawn on the CPU from the seed and the offset of a CUDA generator.

A generator of CUDA is two numbers: a seed, and an offset, which counts what was drawn. PyTorch's own code for CUDA
moves the offset, whether a kernel computes anything or not. So seeds, states that a program saves and restores, forked
generators, and the offsets of CUDA graphs are PyTorch's. Here an operation only gets numbers that depend on both: the
same seed and offset give the same numbers. They are not the numbers that a GPU would draw.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import functools
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

swapped = threading.RLock()
"""held while the CPU's own generator stands at the place of a GPU's"""


def draws(func: Any) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags or "generator" in argument_names(func)


@functools.cache
def argument_names(func: Any) -> list[str]:
    """Return the names of the arguments of an operation."""
    return [argument.name for argument in func._schema.arguments]


def generator_of(flat: list[Any]) -> Generator | None:
    """Return the generator that an operation on a GPU draws from; None for an operation on the CPU.

    Args:
        flat: all arguments of the operation.
    """
    own = next((value for value in flat if isinstance(value, Generator)), None)
    if own is not None:
        return own if own.device.type == "cuda" else None
    found = next((value.device for value in flat if isinstance(value, Tensor) and value.is_cuda), None)
    found = found or next((value for value in flat if isinstance(value, torch.device) and value.type == "cuda"), None)
    if found is None:
        return None
    torch.cuda.init()  # before it there are no generators, and seeds wait
    return torch.cuda.default_generators[torch.cuda.current_device() if found.index is None else found.index]


def state_of(generator: Generator) -> tuple[int, int]:
    """Return the seed and the offset of a CUDA generator; during a capture, the offset within the graph."""
    seed, offset = generator.get_state().view(torch.int64).tolist()
    return seed, offset


class Draw:
    """The place in the sequence of a generator at which an operation draws, once or at each replay of a graph."""

    def __init__(self, generator: Generator, recorded: bool) -> None:
        """Note the place; call this before the operation, which moves the generator on."""
        # What a graph draws from is the state that the generator has now, also if the generator gets another one later.
        self.generator = generator.graphsafe_get_state() if recorded else generator
        self.seed, self.offset = state_of(generator)
        self.recorded = recorded
        self.total = 0

    def captured(self) -> None:
        """Note, when a capture ends, by how much each replay of its graph moves the generator on."""
        self.total = state_of(self.generator)[1]

    def place(self) -> tuple[int, int]:
        """Return the seed and the offset at which to draw now."""
        if not self.recorded:
            return self.seed, self.offset
        seed, after = state_of(self.generator)  # a replay has moved it on before what it records is computed
        return seed, after - self.total + self.offset

    def on_cpu(self) -> Generator:
        """Return a new generator of the CPU for this place.

        Its 32 bits are a CRC, so two places with the same seed have different ones, up to an offset of 2 ** 32.
        """
        return Generator().manual_seed(zlib.crc32(struct.pack("<qq", *self.place())))

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function on CPU tensors, with numbers of this place, which are not taken from those of the CPU."""
        taking = function_with_generator(func)
        if taking is not None:
            return taking(*args, **kwargs | {"generator": self.on_cpu()})
        with swapped:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(self.on_cpu().get_state())
            try:
                return func(*args, **kwargs)
            finally:
                torch.default_generator.set_state(before)


@functools.cache
def function_with_generator(func: Any) -> Callable[..., Any] | None:
    """Return a function that takes a generator and otherwise does the same; None if there is none.

    Only such a function leaves the CPU's own generator alone, from which other threads may draw at the same time.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    if func._schema.name == "aten::native_dropout" and func._overloadname == "default":
        return dropout
    names = argument_names(func)
    if "generator" in names:
        return func if func._schema.arguments[names.index("generator")].kwarg_only else functools.partial(by_name, func)
    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        others = [(it.name, str(it.type)) for it in overload._schema.arguments if it.name != "generator"]
        if "generator" in argument_names(overload) and others == [
            (it.name, str(it.type)) for it in func._schema.arguments
        ]:
            return overload
    return None


def by_name(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation that takes a generator by its position."""
    names = argument_names(func)
    return func(**dict(zip(names, args, strict=False)) | kwargs)


def dropout(x: Tensor, p: float, train: bool | None, *, generator: Generator) -> tuple[Tensor, Tensor]:
    """aten::native_dropout, which takes no generator itself"""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return x * mask * (0 if p == 1 else 1 / (1 - p)), mask

"""Values for the null GPU, computed on the CPU.

Each operation on "cuda" first runs PyTorch's own CUDA code, whose kernels compute nothing, and is then computed on the
CPU, in the same memory.

So checks, formats, allocations and errors are CUDA's, and values the CPU's. What a CUDA graph has recorded is computed
again at each replay. Operations whose result has a size that depends on values are computed first.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import atexit
import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import graphs, kernels, norms, sparse
from .draws import Draw, draws, generator_of

CPU = torch.device("cpu")
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
AS_THEY_ARE = {"c10d", "_c10d_functional", "symm_mem", "profiler", "prim", "prims", "inductor"}
"""namespaces of operations that need no values: NCCL moves real data (src/nccl.cpp)"""
MAKE_TENSORS = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "_resize_output_", "set_"),
    *("detach", "alias", "_reshape_alias", "lift", "lift_fresh", "data"),
}
DESCRIBE_TENSORS = {
    *("is_set_to", "sym_size", "_nested", "_version", "is_pinned", "_has_compatible_shallow_copy_type"),
    *("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss", "record_stream"),
}
READ_MEMORY = {"_pin_memory", "_local_scalar_dense"}
WITHOUT_VALUES = MAKE_TENSORS | DESCRIBE_TENSORS | READ_MEMORY
"""operations that compute no values on the GPU"""

READ_VALUES = {"_linalg_check_errors", "equal"}
"""operations whose own code reads what a kernel has computed"""

MISTAKE = re.compile("out of (bounds|range)|expects all elements|probability tensor contains|invalid multinomial")
"""what the CPU says of a script's mistake, for which a GPU ends the script (a device-side assert)"""

not_computed: dict[str, str] = {}
"""operations without values, and why"""


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor in the memory of a CUDA tensor: of the same shape, strides, layout and format."""
    if sparse.is_sparse(tensor):
        return sparse.of_parts(tensor, [alias(part) for part in sparse.parts(tensor)])
    if type(tensor) is not torch.Tensor:
        tensor = tensor.detach()
    storage = tensor.untyped_storage()
    size, pointer = storage.nbytes(), storage.data_ptr()
    if size == 0 or pointer == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_ubyte * size).from_address(pointer), dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        made = made.conj()
    return made._neg_view() if tensor.is_neg() else made


def on_cuda(value: object) -> bool:
    """Whether a value is a tensor on a GPU."""
    return isinstance(value, torch.Tensor) and value.is_cuda


class Values(TorchDispatchMode):
    """Computes on the CPU what the null GPU does not."""

    supports_higher_order_operators = True
    graphs: ClassVar[WeakKeyDictionary[torch.cuda.CUDAGraph, list[Callable[[], None]]]] = WeakKeyDictionary()
    """what each CUDA graph has recorded"""
    recording: list[Callable[[], None]] | None = None
    """what is recorded now"""
    drawing: ClassVar[list[Draw]] = []
    """the random numbers in it"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and compute its values."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # random numbers of a DTensor, for example
            return func(*[self.with_values(value) for value in args], **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        if any(isinstance(value, torch.Tensor) and type(value) not in PLAIN for value in flat):
            # A FakeTensor has shapes only; the parts of a DTensor and the like come here again.
            return func(*args, **kwargs) if any(issubclass(kind, FakeTensor) for kind in types) else NotImplemented
        name = func._schema.name.partition("::")[2]
        if func.namespace in AS_THEY_ARE:
            if self.recording is not None and func.namespace in ("c10d", "_c10d_functional"):
                self.recording.append(functools.partial(func, *args, **kwargs))
            return func(*args, **kwargs)
        gpu = next((value.device for value in flat if on_cuda(value)), None)
        if gpu is None and any(map(sparse.is_sparse, flat)):  # that may be moved to a GPU
            gpu = next((value for value in flat if isinstance(value, torch.device) and value.type == "cuda"), None)
        # x[numbers] has this tag too, although only x[mask] waits for values.
        sized = torch.Tag.dynamic_output_shape in func.tags and name != "index"
        reads = name in READ_VALUES or sized or has_mask(name, args) or sparse.concerns(name, flat)
        if gpu is not None and reads:
            return self.compute_first(func, flat, spec, gpu)
        draw = self.draw(func, flat)
        out = without_check(func, args, kwargs)
        flat_out = tree_flatten(out)[0]
        if name in WITHOUT_VALUES or not (gpu is not None or any(map(on_cuda, flat_out))):
            return out
        if any(map(sparse.is_sparse, (*flat, *flat_out))):
            # Either it is made of tensors that have their values, or, such as a gradient, it is computed anew.
            return out if name in sparse.ONLY_PARTS else self.compute_first(func, flat, spec, gpu)
        if func.is_view and shares_memory(flat_out, flat):  # `to`, `contiguous` and `reshape` may make a copy
            return out
        return self.compute_after(func, flat, spec, out, draw)

    def draw(self, func: Any, flat: list) -> Draw | None:
        """Return where in the random numbers of the GPU an operation is about to draw; None if it draws none."""
        generator = generator_of(flat) if draws(func) else None
        if generator is None:
            return None
        draw = Draw(generator, recorded=self.recording is not None)
        if draw.recorded:
            self.drawing.append(draw)
        return draw

    def with_values(self, value: Any) -> Any:
        """Return a function that computes values, for a function that a higher-order operation calls."""
        if not callable(value) or isinstance(value, torch.Tensor):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return call

    def compute_first(self, func: Any, flat: list, spec: Any, gpu: torch.device) -> Any:
        """Compute an operation whose result has a size that depends on values; the CPU waits for this size."""
        torch.cuda.current_stream(gpu).synchronize()
        given = [to_cpu(value) for value in flat]
        args, kwargs = tree_unflatten(given, spec)
        found, out_spec = tree_flatten(self.run(func, args, kwargs, self.draw(func, flat)))
        own = {id(value): on_gpu for value, on_gpu in zip(given, flat, strict=True) if isinstance(value, torch.Tensor)}
        for value in written(func, args, kwargs):  # a dense tensor shares its memory with the CPU's
            if sparse.is_sparse(value) and own[id(value)].is_cuda:
                sparse.overwrite(own[id(value)], to_gpu(value, gpu))
        stays = any(isinstance(value, torch.device) and value.type == "cpu" for value in flat)
        made = []
        for value in found:
            if id(value) in own:
                made.append(own[id(value)])
            else:
                made.append(to_gpu(value, gpu) if isinstance(value, torch.Tensor) and not stays else value)
        return tree_unflatten(made, out_spec)

    def compute_after(self, func: Any, flat: list, spec: Any, out: Any, draw: Draw | None) -> Any:
        """Compute on the CPU what the GPU has left as it was, now or at each replay of a graph."""
        args, kwargs = tree_unflatten([to_cpu(value) for value in flat], spec)
        flat_out, out_spec = tree_flatten(out)
        given = {id(value) for value in flat if isinstance(value, torch.Tensor)}
        targets = [None if id(value) in given else target_of(value, draw is not None) for value in flat_out]
        answers: list[Any] = []

        def compute() -> None:
            try:
                found = tree_flatten(self.run(func, args, kwargs, draw))[0]
            except torch.linalg.LinAlgError:
                raise  # a mistake of the script's: a singular matrix, for example
            except (RuntimeError, NotImplementedError, TypeError) as error:
                if MISTAKE.search(str(error)):
                    raise
                not_computed.setdefault(str(func), str(error).splitlines()[0][:120])
                return
            for target, value in zip(targets, found, strict=False):
                if target is not None and isinstance(value, torch.Tensor):
                    target.copy_(value)
            answers[:] = found

        if self.recording is not None:
            self.recording.append(compute)
            return out
        compute()
        if answers and any(isinstance(value, bool | int | float) for value in flat_out):  # aten::equal, for example
            chosen = [a if isinstance(o, bool | int | float) else o for a, o in zip(answers, flat_out, strict=True)]
            return tree_unflatten(chosen, out_spec)
        return out

    def run(self, func: Any, args: Any, kwargs: Any, draw: Draw | None) -> Any:
        """Run an operation on CPU tensors."""

        def call(function: Any, given: Any) -> Any:
            return function(*given, **kwargs) if draw is None else draw.run(function, given, kwargs)

        with torch.no_grad():
            if special := kernels.SPECIAL.get(func._schema.name):
                return call(special, args)
            try:
                return call(func, args)
            except (RuntimeError, NotImplementedError) as error:
                if not re.search("not implemented for '(BFloat16|Half)'", str(error)) or func._schema.is_mutable:
                    raise
                return call(func, norms.in_32_bits(args))


def target_of(value: Any, with_cpu: bool) -> torch.Tensor | None:
    """Return the memory of a result that an operation has to fill; None for a number.

    Args:
        with_cpu: also a result on the CPU, such as the seed from which the backward pass of attention draws again.
    """
    if on_cuda(value):
        return alias(value)
    return value if with_cpu and isinstance(value, torch.Tensor) else None


def without_check(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; one that would read values on the GPU to check them leaves that to its run on the CPU."""
    if func._schema.name == "aten::normal" and isinstance(args[1], torch.Tensor):  # may read whether std is negative
        shape = torch.broadcast_shapes(*(value.shape for value in args[:2] if isinstance(value, torch.Tensor)))
        mean = next(value for value in args if isinstance(value, torch.Tensor)).expand(shape)
        return torch.ops.aten.normal.Tensor_float(mean, 1.0, **{k: v for k, v in kwargs.items() if k == "generator"})
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "check_errors":
            if number < len(args):
                args = (*args[:number], False, *args[number + 1 :])
            else:
                kwargs = kwargs | {"check_errors": False}
    return func(*args, **kwargs)


def written(func: Any, args: Any, kwargs: Any) -> list:
    """Return the tensors that an operation changes."""
    arguments = func._schema.arguments
    names = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
    given = dict(zip([each.name for each in arguments], args, strict=False)) | kwargs
    return [value for value in tree_flatten([given.get(name) for name in names])[0] if isinstance(value, torch.Tensor)]


def has_mask(name: str, args: Any) -> bool:
    """Whether this is x[mask], whose number of elements depends on the values of the mask."""
    return name == "index" and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )


def shares_memory(made: list, given: list) -> bool:
    """Whether all tensors that an operation made lie in memory that it was given."""
    own = {value.untyped_storage().data_ptr() for value in given if isinstance(value, torch.Tensor)}
    return all(value.untyped_storage().data_ptr() in own for value in made if isinstance(value, torch.Tensor))


def to_gpu(tensor: torch.Tensor, gpu: torch.device) -> torch.Tensor:
    """Return a tensor on a GPU with the values of one on the CPU."""
    if sparse.is_sparse(tensor):
        return sparse.of_parts(tensor, [to_gpu(part.contiguous(), gpu) for part in sparse.parts(tensor)])
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=gpu)
    alias(made).copy_(tensor)
    return made


def to_cpu(value: Any) -> Any:
    """Return what an operation on the CPU is given in place of an argument."""
    if isinstance(value, torch.Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return CPU
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return None  # see draws.py
    return value


def install() -> None:
    """Compute the values of this process: in all its threads, and at each replay of a graph."""
    mode = Values()

    def captures(graph: torch.cuda.CUDAGraph) -> None:
        Values.recording = Values.graphs[graph] = []
        Values.drawing = []

    def captured(graph: torch.cuda.CUDAGraph) -> None:
        Values.recording = None
        for draw in Values.drawing:
            draw.captured()

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        for compute in Values.graphs.get(graph, ()):
            compute()

    graphs.follow(captures, captured, replayed)
    torch.compile = without_compiling(torch.compile)
    run = threading.Thread.run

    def run_with_values(self: threading.Thread) -> None:
        with Values():
            run(self)

    threading.Thread.run = run_with_values  # type: ignore[method-assign]
    mode.__enter__()
    atexit.register(say_what_has_no_values)


def without_compiling(own: Any) -> Any:
    """Return torch.compile for functions that run as they are: values are computed operation by operation.

    PyTorch would do the same by itself, after it has tried, but raises an error with fullgraph=True.
    """

    @functools.wraps(own)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.set_stance("force_eager")  # imports the compiler, so not before it is needed
        return own(*args, **kwargs)

    return compile_


def say_what_has_no_values() -> None:
    """Name, at the end, the operations that were not computed."""
    for name, why in not_computed.items():
        print(f"nullgpu: note: no values for {name}: {why}", file=sys.stderr)
    if not_computed and os.environ.get("NULLGPU_STRICT"):
        sys.stderr.flush()
        os._exit(71)

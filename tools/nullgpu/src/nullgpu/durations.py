"""What work an operation of PyTorch is, from its arguments; `curves` says how long that takes."""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .calibration import Calibration
from .curves import Attention, BatchNorm, Convolution, Curves, Gpu, Moved, Product, Work
from .interface import Settings

PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "_int_mm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
"""where the first of the two matrices is among the arguments"""
BATCH_NORMS = ("cudnn_batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
ROWS = (
    "embedding",
    "index_select",
    "index",
    "gather",
    "take_along_dim",
    "_embedding_bag",
    "_embedding_bag_forward_only",
)
"""operations that read as much of their first tensor as they return"""
WRITES_ONLY = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "_foreach_zero_",
    "_foreach_copy_",
)
"""operations that do not read what they change in place"""
MANY_ROWS = 60_000
"""of a sum along columns, from which on more of them fill the GPU and cost nothing but their bytes"""
COPIES, JOINS = ("copy_", "_to_copy", "clone"), ("cat", "stack")
FUNCTIONS = (
    "gelu",
    "gelu_backward",
    "native_dropout",
    "silu",
    "silu_backward",
    "tanh",
    "sigmoid",
    "exp",
    "elu",
    "mish",
)
"""operations whose arithmetic takes longer than the memory does for 16 bits"""
KINDS = {
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), "layer norm"),
    **dict.fromkeys(
        ("native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward"), "layer norm backward"
    ),
    "_softmax": "softmax",
    "_log_softmax": "log-softmax",
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), "softmax backward"),
    **dict.fromkeys(
        (
            "sum",
            "mean",
            "norm",
            "linalg_vector_norm",
            "amax",
            "amin",
            "max",
            "min",
            "argmax",
            "var",
            "var_mean",
            "cumsum",
        ),
        "reductions",
    ),
    "embedding_dense_backward": "embedding backward",
    **dict.fromkeys(("index", "gather", "scatter", "index_put", "_index_put_impl_", "take_along_dim"), "gathers"),
    **dict.fromkeys(("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce"), "scattered sums"),
}
"""the kinds of operations; of others: moved bytes ("elements")"""


CELLS = "nn.LSTM or nn.GRU cell by cell (on a GPU, cuDNN took a fifth of the time)"
"""what the report says of recurrent networks, which are no single operation here"""


class Durations:
    """The durations of operations on one GPU."""

    def __init__(self, settings: Settings) -> None:
        it = settings
        self.curves = Curves(
            Gpu(it.name, it.peak, it.bandwidth, it.multiprocessors, it.clock_rate, it.shortest, it.measured)
        )
        self.calibration = Calibration(Path(it.calibration)) if it.calibration else None
        self.by = dict.fromkeys(("trace", "gpu", "scaled"), 0.0)
        """seconds that are known from a trace, by curves fitted to this GPU, and by curves of another one"""
        self.unknown: set[str] = set()
        """operations of which nothing is known"""

    def of(self, func: Any, args: Any, kwargs: Any, out: Any, launches: int) -> float:
        """Return how many seconds an operation takes that makes so many launches."""
        if self.calibration is not None:
            known = self.calibration.seconds(func, args, kwargs, self.curves.gpu.shortest)
            if known is not None:
                self.by["trace"] += known
                return known
        it = work_of(func, args, kwargs, out, launches)
        if name_of(func).startswith("_thnn_fused"):
            self.unknown.add(CELLS)
        if isinstance(it, Moved) and not it.moved:
            self.unknown.add(name_of(func))
        return self.of_work(it)

    def forget(self) -> None:
        """Begin to count anew from where durations are known."""
        self.by = dict.fromkeys(self.by, 0.0)

    def of_work(self, work: Work) -> float:
        """Return how many seconds this work takes by the curve of its kind."""
        seconds = self.curves.seconds(work)
        self.by["gpu" if self.curves.is_own(work) else "scaled"] += seconds
        return seconds

    def of_compiled(self, name: str, moved: float, products: bool) -> float:
        """Return how many seconds a kernel of torch.compile takes that moves so many bytes."""
        if products:
            self.unknown.add(name)
        return self.of_work(Moved("elements", moved, 0))


def name_of(func: Any) -> str:
    """Return the name of an operation."""
    return func._schema.name.partition("::")[2]


def work_of(func: Any, args: Any, kwargs: Any, out: Any, launches: int) -> Work:
    """Return what kind of work an operation is."""
    name = name_of(func)
    named = {it.name: value for it, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    if name in PRODUCTS:
        return product(args[PRODUCTS[name]], args[PRODUCTS[name] + 1])
    if "convolution" in name and "weight" in named and isinstance(named.get("padding"), list | tuple):
        return convolution(named, out)
    if "attention" in name and "query" in named and named["query"].dim() == 4:
        return attention(name, named)
    if "batch_norm" in name and (it := batch_norm(name, named)):
        return it
    return moved(func, name, args, kwargs, out, launches)


def product(a: Tensor, b: Tensor) -> Product:
    """Return the work of a product of two matrices, or of two batches of them."""
    batch = a.shape[0] if a.dim() == 3 else 1
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    rows = [
        k if a.stride(-1) == 1 else m,
        n if b.stride(-1) == 1 else k,
        n,
    ]  # of both, and of the product
    aligned = all(row * a.element_size() % 16 == 0 for row in rows)
    return Product(format_of(a.dtype, "matmul"), batch, m, n, k, aligned)


def attention(name: str, named: dict[str, Any]) -> Attention:
    """Return the work of attention that does not store its scores."""
    query, key = named["query"], named["key"]  # (N, heads, T, width)
    samples, heads, queries, width = query.shape
    exact = query.dtype in (torch.bfloat16, torch.float16)
    number_format = format_of(query.dtype, "attention") if exact else "fp32"
    causal = bool(named.get("is_causal"))
    return Attention(number_format, "backward" in name, samples * heads, queries, key.shape[2], width, causal)


def convolution(named: dict[str, Any], out: Any) -> Convolution:
    """Return the work of a convolution or of its backward pass."""
    x, weight, grad = named["input"], named["weight"], named.get("grad_output")
    y = out if grad is None else grad
    groups = named.get("groups", 1)
    gradients = 0 if grad is None else max(1, sum(map(bool, named["output_mask"][:2])))
    if named.get("transposed"):  # it is the backward pass of a convolution from y to x
        x, y = y, x
    dimensions = max(weight.dim() - 2, 1)
    return Convolution(
        format=format_of(x.dtype, "conv"),
        dimensions=3 if dimensions == 3 else 2,
        backward=gradients,
        channels_last=is_channels_last(named["input"]) or is_channels_last(weight),
        channels=x.shape[1] / groups,
        outputs=y.shape[1] / groups,
        groups=groups,
        positions=prod(y.shape[2:]),
        samples=y.shape[0],
        kernel=prod(weight.shape[2:]),
        input_bytes=size_of(x),
        output_bytes=size_of(y),
        transposed=bool(named.get("transposed")),
        searched=torch.backends.cudnn.benchmark,
    )


def is_channels_last(x: Tensor) -> bool:
    """Whether the numbers of all channels of a position are beside one another."""
    return x.dim() > 2 and x.shape[1] > 1 and x.stride(1) == 1 and prod(x.shape[2:]) > 1


def batch_norm(name: str, named: dict[str, Any]) -> BatchNorm | None:
    """Return the work of a batch norm in training; None for another one, which only scales."""
    backward = name.endswith("_backward")
    x = named.get("input")
    training = named.get("training", named.get("train", name != "_batch_norm_no_update"))
    if not isinstance(x, Tensor) or x.dim() < 2 or not training:
        return None
    if not backward and name not in BATCH_NORMS:
        return None
    half, last = x.dtype in (torch.bfloat16, torch.float16), is_channels_last(x)
    mixed = name.startswith("cudnn")  # which PyTorch takes for 16 bits if the weights have 32
    return BatchNorm(half, backward, last, x.shape[1], x.numel(), x.element_size(), mixed)


def moved(func: Any, name: str, args: Any, kwargs: Any, out: Any, launches: int) -> Moved:
    """Return the work of any other operation: the bytes of its tensors, and what it does with an element."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    known = {id(t) for t in tensors}
    returned = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and id(t) not in known]
    written = sum(map(size_of, returned))
    read, in_place = sum(map(size_of, tensors)), written_in_place(func, args, kwargs)
    if name in ROWS:
        read = written + sum(map(size_of, tensors[1:]))
    elif name.startswith("nll_loss"):  # it looks one number of each row up
        read = 0
    if name not in WRITES_ONLY and "out" not in kwargs:
        read += in_place
    elements = max([t.numel() for t in (*tensors, *returned)], default=0)
    kind = kind_of(name, tensors)
    if kind == "reductions" and is_along_columns(args):
        kind = "column sums"
    if kind == "elements" and (name == "roll" or is_strided(func, tensors, elements)):
        kind = "strided"
    rows = rows_of(name, tensors, args) if kind.startswith("layer norm") else 0
    if kind == "column sums":
        rows = min(MANY_ROWS, args[0].numel() / max(1, sum(t.numel() for t in returned)))
    return Moved(kind, read + written, elements * (2 if "pool" in name and "backward" in name else 1), launches, rows)


def is_along_columns(args: Any) -> bool:
    """Return whether a reduction leaves the numbers that are beside one another in memory."""
    x = args[0]
    over = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    if not isinstance(x, Tensor) or not over or not x.dim():
        return False
    inner = min(range(x.dim()), key=lambda at: (x.stride(at), x.shape[at] == 1))
    return inner not in [at % x.dim() for at in over]


def is_strided(func: Any, tensors: list[Tensor], elements: int) -> bool:
    """Return whether an operation has to compute where each number is: gaps in a large tensor, or a smaller one."""
    joins = name_of(func) in JOINS
    if not joins and name_of(func) not in COPIES and torch.Tag.pointwise not in func.tags:
        return False
    large = [t for t in tensors if t.dim() and t.numel() > 1]
    return any(
        not torch.ops.aten.is_non_overlapping_and_dense(t) if joins or 2 * t.numel() > elements else t.dim() > 1
        for t in large
    )


def rows_of(name: str, tensors: list[Tensor], args: Any) -> float:
    """Return the number of rows that a norm takes the mean of, or of groups of channels."""
    x = tensors[1 if name.endswith("backward") else 0]
    if "group_norm" in name:
        return x.shape[0] * args[8 if name.endswith("backward") else 6]
    shape = next((it for it in args if isinstance(it, list | tuple) and it and isinstance(it[0], int)), [1])
    return x.numel() / max(prod(shape), 1)


def kind_of(name: str, tensors: list[Tensor]) -> str:
    """Return the curve of an operation that is limited by the memory, or by instructions for each element."""
    if name.startswith("_fft"):
        return "fft"
    if name.startswith("_foreach_"):
        return "lists of tensors"
    if name.startswith("_fused_"):
        return KINDS.get(name, "fused optimizers")
    if "pool" in name and "adaptive" not in name:
        return "pools"
    if name.rstrip("_") in FUNCTIONS and any(t.element_size() == 2 for t in tensors if t.is_floating_point()):
        return "functions of 16 bits"
    return KINDS.get(name, "elements")


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor on the GPU: of one that is expanded, those that it has in memory."""
    if not tensor.is_cuda or tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def written_in_place(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes of the arguments that an operation changes."""
    total = 0
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            total += sum(size_of(t) for t in tree_flatten(value)[0] if isinstance(t, Tensor))
    return total


def format_of(dtype: torch.dtype, kind: str) -> str:
    """Return the name of the format in which matrix units compute this type."""
    if dtype == torch.float16:
        return "fp16"
    if dtype == torch.bfloat16 or dtype.itemsize == 1:  # 8 bits have no figures of their own
        return "bf16"
    fast = torch.backends.cudnn.allow_tf32 if kind == "conv" else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if dtype == torch.float32 and fast else "fp32"

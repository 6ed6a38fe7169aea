"""Fit the curves of the null GPU's clock to the operations that an H200 was timed with.

    python lab/studies/clock_fit.py          # some minutes

It writes tools/nullgpu/src/nullgpu/curves.json, and a table of the errors: each shape is left out once, and predicted
by curves that were fitted to the others. The measured operations are results/nvidia_h200_1gpu/operations.json, and
single operations of the traces of five trainings (`USED`, in operations_in_trainings.json). All other trainings test
the curves. (lab/studies/gpu_operations.py measures such a table on another GPU.)

A backward pass was timed with PyTorch's autograd, whose host needs longer than a GPU does for a small one. So the time
of a backward pass is fitted as the larger one of the GPU's and a fixed time, which is the host's and is not kept.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import nullgpu.fit  # noqa: E402
import torch  # noqa: E402
from nullgpu import curves, durations, gpus  # noqa: E402
from nullgpu.curves import Attention, BatchNorm, Convolution, Curves, Moved, Product, Work  # noqa: E402
from nullgpu.fit import Timed  # noqa: E402

from lab import results  # noqa: E402

OPERATIONS = REPOSITORY / "results/nvidia_h200_1gpu/operations.json"
IN_TRAININGS = REPOSITORY / "results/nvidia_h200_1gpu/operations_in_trainings.json"
USED = ("resnet152", "convnext", "llama", "graph", "fourier")
"""trainings whose operations are fitted to"""
HOST = {True: 140e-6, False: 185e-6, None: 100e-6}
"""seconds of the host in a backward pass: of a convolution, channels last or first, and of attention; shorter rows may
be the host's, and are not fitted"""


@dataclass
class Row:
    """A measured operation."""

    group: str
    """the curve that it belongs to"""
    kind: str
    """under which its error is listed"""
    shape: str
    works: list[Work]
    """its kernels, one after the other"""
    seconds: float


def size_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return 2 if dtype in ("bf16", "fp16") else 4


def rows() -> Iterator[Row]:
    """Yield the measured operations that the curves can be fitted to."""
    table = json.loads(OPERATIONS.read_text())
    for cells in table["rows"]:
        row = dict(zip(table["columns"], cells, strict=True))
        name, dtype = row["operation"], row["format"]
        shape = [json.loads(word.lower()) for word in row["shape"].split(" x ")] if row["shape"] else []
        for group, kind, works in described(name, dtype, shape, row["layout"], row["bytes"]):
            yield Row(group, kind, f"{name.split('_')[0]} {row['shape']}", works, 1e-6 * row["microseconds"])


def rows_of_trainings() -> Iterator[Row]:
    """Yield operations of the traces of trainings."""
    table = json.loads(IN_TRAININGS.read_text())
    for cells in table["rows"]:
        row = dict(zip(table["columns"], cells, strict=True))
        if row["training"] not in USED or row["microseconds"] < SHORTEST_OF_TRACE:
            continue
        tensors = tensors_of(row["sizes"], row["types"], row["strides"])
        for group, kind, work in of_trace(row["operation"], tensors):
            yield Row(group, kind, f"{row['operation']} {row['sizes']}", [work], 1e-6 * row["microseconds"])


aten = torch.ops.aten
OPERATORS = {
    "roll": aten.roll.default, "copy_": aten.copy_.default, "cat": aten.cat.default, "mul": aten.mul.Tensor,
    "add_": aten.add_.Tensor, "add": aten.add.Tensor,
}  # fmt: skip
SHORTEST_OF_TRACE = 8
"""microseconds; what is shorter is the floor of a kernel"""
TYPES = {
    "float": torch.float32,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "c10::complex<float>": torch.complex64,
    "long int": torch.int64,
}


def tensors_of(sizes: list[Any], types: list[Any], strides: list[Any]) -> list[torch.Tensor]:
    """Return tensors without numbers, of the sizes that a trace has; those of a list have no type there: bfloat16."""
    found: list[torch.Tensor] = []
    for size, kind, stride in zip(sizes, types, strides, strict=True):
        if size and isinstance(size[0], list):
            found += tensors_of(size, ["c10::BFloat16"] * len(size), stride)
        elif size and kind in TYPES:
            found.append(torch.empty_strided(size, stride, dtype=TYPES[kind], device="meta"))
    return found


def of_trace(name: str, tensors: list[torch.Tensor]) -> Iterator[tuple[str, str, Work]]:
    """Yield the curve, the kind and the work of an operation of a trace; nothing if its curve is not fitted to them."""
    if name in durations.PRODUCTS:
        work = durations.product(*tensors[-2:])
        yield f"product {curves.family(work.format)}", "products", work
        return
    if name.startswith("cudnn_batch_norm"):
        x, backward = tensors[0], name.endswith("backward")
        if not durations.is_channels_last(x) and x.element_size() == 2:
            norm = BatchNorm(True, backward, False, x.shape[1], x.numel(), 2, mixed=True)
            yield f"batch norm mixed {'backward' if backward else 'forward'}", "batch norms", norm
        return
    elements = max((t.numel() for t in tensors), default=0)
    size = sum(t.numel() * t.element_size() for t in tensors)
    kind, written = durations.KINDS.get(name), elements * max((t.element_size() for t in tensors), default=0)
    if kind in ("layer norm", "layer norm backward") and "group" not in name:
        x = tensors[0]
        moved = x.numel() * x.element_size() * (3 if kind.endswith("backward") else 2)
        yield kind, "layer norm", Moved(kind, moved, x.numel(), rows=x.numel() / x.shape[-1])
    elif kind in ("gathers", "scattered sums"):
        longest = max(tensors, key=lambda t: t.numel())
        if name != "index":  # of its indices, a trace has no sizes
            yield kind, "gathers and scatters", Moved(kind, 2 * written, longest.numel())
    elif name == "sum" and elements > tensors[0].shape[-1]:
        # Of (N, C, H, W), C channels are kept; of (N, C), C columns.
        kept = tensors[0].shape[1] if tensors[0].dim() > 2 else tensors[0].shape[-1]
        rows = min(durations.MANY_ROWS, elements / kept)
        yield "column sums", "column sums", Moved("column sums", size, elements, rows=rows)
    elif name.startswith("_fft"):
        yield "fft", "Fourier transforms", Moved("fft", 2 * size, elements)
    elif name in OPERATORS:
        if name == "cat":
            elements = sum(t.numel() for t in tensors)
        if name == "roll" or durations.is_strided(OPERATORS[name], tensors, elements):
            moved = size if name == "copy_" else size + (size if name in ("cat", "roll") else written)
            yield "strided", "strided", Moved("strided", moved, elements)


def described(
    name: str, dtype: str, shape: list[Any], layout: str, moved: float
) -> Iterator[tuple[str, str, list[Work]]]:
    """Yield the curve, the kind and the kernels of an operation; nothing if it is no operation of a kind."""
    backward = name.endswith("_backward")
    last = layout == "cl"
    if name == "mm":
        yield f"product {curves.family(dtype)}", "products", [Product(dtype, 1, *shape)]
    elif name == "bmm":
        yield f"product {curves.family(dtype)}", "products", [Product(dtype, *shape)]
    elif name.startswith("sdpa"):
        samples, heads, positions, width, causal = shape
        exact = "fp32" if dtype == "fp32" else "16 bits"
        group = f"attention {exact} {'backward' if backward else 'forward'}"
        it = Attention(dtype, backward, samples * heads, positions, positions, width, causal)
        yield group, f"attention, {'backward' if backward else 'forward'}", [it]
    elif name.startswith("conv"):
        dimensions, (samples, channels, outputs, edge, kernel, stride) = int(name[4]), shape
        out = (edge + 2 * (kernel // 2) - kernel) // stride + 1
        inputs = size_of(dtype) * samples * channels * edge**dimensions
        output = size_of(dtype) * samples * outputs * out**dimensions
        gradients = (1 if channels <= curves.FEW else 2) if backward else 0
        it2 = Convolution(
            dtype, dimensions, gradients, last, channels, outputs, 1, out**dimensions, samples, kernel**dimensions,
            inputs, output,
        )  # fmt: skip
        kind = f"convolutions, {dimensions}-D, {'backward' if backward else 'forward'}"
        if is_odd(dtype, shape, dimensions):
            kind = "convolutions, 3-D, TF32, odd outputs (not fitted)"
        yield f"convolution {dimensions}-D {curves.family(dtype)}", kind, [it2]
    elif name.startswith("batch_norm"):
        samples, channels, edge = shape
        half = dtype in curves.HALF
        group = f"batch norm {'last' if last else 'first'} {'backward' if backward else 'forward'}"
        elements = samples * channels * edge**2
        it3 = BatchNorm(half, backward, last, channels, elements, size_of(dtype))
        yield f"{group} {'16 bits' if half else '32 bits'}", "batch norms", [it3]
    else:
        yield from of_bytes(name, dtype, shape, moved)


def is_odd(dtype: str, shape: list[Any], dimensions: int) -> bool:
    """Whether a convolution of volumes is one that no network has.

    They were timed with an even kernel and half of it as padding, so the edge of their output is 17, 9 or 5, not 16, 8
    or 4. In TF32, cuDNN then takes kernels that are two to four times slower.
    """
    return dimensions == 3 and dtype == "tf32" and shape[1] > curves.FEW and shape[4] % 2 == 0


KINDS = {
    **dict.fromkeys(("copy", "add", "relu", "cast"), "elements"),
    **dict.fromkeys(("gelu", "dropout"), "functions of 16 bits"),
    "sum": "reductions",
    "softmax_forward": "softmax",
    "layer_norm_forward": "layer norm",
    "layer_norm_backward": "layer norm backward",
    "max_pool2d": "pools",
    "embedding_forward": "elements",
    "adam_fused": "fused optimizers",
    "adamw_fused": "fused optimizers",
}


def of_bytes(name: str, dtype: str, shape: list[Any], moved: float) -> Iterator[tuple[str, str, list[Work]]]:
    """Yield the same for operations that are limited by the memory, or by instructions for each element."""
    elements = 1.0
    for number in shape[:1] if "adam" in name or "sgd" in name else shape:
        elements *= number
    if name == "max_pool2d":
        elements *= shape[-1]  # an image is a square
    kind = KINDS.get(name)
    rows = elements / shape[-1] if kind and kind.startswith("layer norm") else 0
    if kind:
        listed = "memory" if kind in ("elements", "functions of 16 bits", "reductions", "fused optimizers") else kind
        if kind == "fused optimizers":  # PyTorch says that it changes the gradients, too
            moved = 32 * elements
        yield kind, {"layer norm backward": "layer norm"}.get(listed, listed), [Moved(kind, moved, elements, rows=rows)]
    elif name == "adam_foreach":  # 19 numbers of 4 bytes for a weight, in nine operations
        yield "lists of tensors", "memory", [Moved("lists of tensors", 76 * elements / 9, elements)] * 9
    elif name == "sgd_foreach":
        yield "lists of tensors", "memory", [Moved("lists of tensors", 32 * elements / 3, elements)] * 3
    elif name == "cross_entropy_forward" and dtype == "fp32":
        yield "log-softmax", "softmax", [Moved("log-softmax", 8 * elements, elements)]
    elif name == "cross_entropy_backward" and dtype == "fp32":
        parts: list[Work] = [
            Moved("elements", 4 * elements, elements),
            Moved("softmax backward", 12 * elements, elements),
        ]
        yield "softmax backward", "softmax", parts
    elif name == "embedding_backward":
        yield "embedding backward", "embedding", [Moved("embedding backward", moved, elements)]


START: dict[str, dict[str, float]] = {
    "product": {"floor": 5, "share": 0.8, "tiles": 0.3, "memory": 0.8},
    "attention": {"floor": 5, "share": 0.8, "score": 0.4, "tile": 128, "rows": 100},
    "convolution": {
        "floor": 6, "forward": 0.6, "backward": 0.5, "channels": 40, "memory": 0.7, "few": 0.04,
        "strided": 0.8,
    },
    "batch norm": {"floor": 5, "element": 4, "idle": 1},
    "elements": {"floor": 4, "share": 0.88},
    "reductions": {"floor": 8, "share": 0.88},
    "fused optimizers": {"floor": 4, "share": 0.7},
    "lists of tensors": {"floor": 4, "share": 0.75},
    "embedding backward": {"floor": 250, "share": 0.6},
    "softmax backward": {"floor": 5, "share": 0.6},
    "log-softmax": {"floor": 5, "share": 0.6, "element": 3},
    "layer norm": {"floor": 6, "share": 0.88, "element": 0.3, "row": 1.4},
    "layer norm backward": {"floor": 40, "share": 0.6, "element": 0.3, "row": 1.4},
    "batch norm mixed": {"floor": 3, "element": 2, "large": 5, "idle": 0.8},
    "column sums": {"floor": 6, "share": 0.6, "row": 0.9},
    "fft": {"floor": 10, "share": 0.38},
}  # fmt: skip
"""parameters to begin the fit with; others: a floor, a share of the bandwidth, and picoseconds for an element"""
LARGE_ONLY = ("strided", "column sums", "gathers", "scattered sums", "fft")
"""curves that were fitted to large operations only, whose floor stays"""
STARTED = {"floor": 5.0, "share": 0.8, "element": 1.0}


def start_of(group: str) -> dict[str, float]:
    """Return the parameters to begin with."""
    families = ("batch norm mixed", "product", "attention", "convolution", "batch norm")
    name = next((name for name in START if group == name), None) or next(
        (name for name in families if group.startswith(name)), ""
    )
    found = dict(START.get(name, STARTED))
    if group == "product 16 bits":
        found["unaligned"] = 0.45
    if group == "convolution 3-D 16 bits":
        found["guess"] = 0.02
    if group == "convolution 2-D 16 bits":
        found["transpose"] = 0.45
    if group.startswith("convolution") and group.endswith("16 bits"):
        found["few in fp16"] = 2.5
    return found


GPU = "h200"


def gpu() -> curves.Gpu:
    """Return the GPU that was measured."""
    return gpus.curves_of(gpus.read(GPU))


def predicted(row: Row, parameters: dict[str, dict[str, float]]) -> float:
    """Return the seconds of an operation by these parameters."""
    model = Curves(gpu(), parameters)
    return sum(model.seconds(work) for work in row.works)


def is_hosts(row: Row) -> bool:
    """Whether the time of a backward pass may be the host's."""
    it = row.works[0]
    if not isinstance(it, Convolution | Attention) or not it.backward:
        return False
    return row.seconds < HOST[it.channels_last if isinstance(it, Convolution) else None]


def error(row: Row, parameters: dict[str, dict[str, float]]) -> float:
    """Return the logarithm of the factor by which the parameters are wrong."""
    return abs(log(predicted(row, parameters) / row.seconds))


def fitted(group: str, chosen: Sequence[Row], others: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the parameters of a curve with which it is near these rows."""
    used = [row for row in chosen if not is_hosts(row) and "not fitted" not in row.kind]
    timed = [Timed(group, row.works, row.seconds) for row in used]
    fixed = ("floor",) if group in LARGE_ONLY else ()
    return nullgpu.fit.fitted(replace(gpu(), measured=others), group, timed, start_of(group), fixed, step=0.7)


def fit(
    chosen: Sequence[Row], groups: Sequence[str], before: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the parameters of some curves, fitted to rows, with those of all others."""
    found = dict(before)
    for group in groups:
        found[group] = fitted(group, [row for row in chosen if row.group == group], found)
    return found


FORMER = {"product": 0.65, "attention": 0.40, "convolution": 0.35}
"""shares of the peak that the clock took until 2026-11-26; 0.62 of the bandwidth"""


def formerly(row: Row) -> float:
    """Return the seconds that the clock said before it had curves."""
    total = 0.0
    for it in row.works:
        arithmetic = moved = 0.0
        size = 2 if getattr(it, "format", "") in curves.HALF else 4
        if isinstance(it, Product):
            arithmetic = 2 * it.batch * it.m * it.n * it.k / (gpu().peak[it.format] * FORMER["product"])
            moved = size * it.batch * (it.m * it.k + it.k * it.n + it.m * it.n)
        elif isinstance(it, Attention):
            peak = max(gpu().peak["fp32"], gpu().peak["tf32"] / 3) if it.format == "fp32" else gpu().peak[it.format]
            products = (10 if it.backward else 4) * it.sequences * it.queries * it.keys * it.width
            arithmetic = products / (peak * FORMER["attention"])
            moved = size * it.sequences * it.queries * it.width * (8 if it.backward else 4)
        elif isinstance(it, Convolution):
            each = 2 * it.samples * it.positions * it.outputs * it.channels * it.groups * it.kernel
            arithmetic = max(it.backward, 1) * each / (gpu().peak[it.format] * FORMER["convolution"])
            moved = (it.input_bytes + it.output_bytes) * (2 if it.backward else 1)
        elif isinstance(it, BatchNorm):
            moved = it.elements * it.size * (3 if it.backward else 2)
        else:
            moved = it.moved
        total += max(arithmetic + 1e-5 if arithmetic else 0, moved / (gpu().bandwidth * 0.62), 2.5e-6)
    return total


def summarized(errors: Sequence[float]) -> list[results.Cell]:
    """Return the median and the largest factor."""
    return [exp(median(errors)), exp(max(errors))] if errors else [None, None]


def main() -> None:
    """Fit, store the parameters and the table of errors."""
    measured = [*rows(), *rows_of_trainings()]
    groups = sorted({row.group for row in measured}, key=lambda group: (group != "elements", group))
    parameters = fit(measured, groups, {})
    it = gpu()
    found = {
        "gpu": {
            "name": gpus.read(GPU)["name"],
            "multiprocessors": it.multiprocessors,
            "clock_rate": it.clock_rate,
            "shortest": it.shortest,
            "peak": dict(it.peak),
        },
        "parameters": parameters,
    }
    curves.FILE.write_text(json.dumps(found, indent=1) + "\n")
    errors: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for group in groups:
        mine = [row for row in measured if row.group == group]
        for shape in sorted({row.shape for row in mine}):
            left_out = [row for row in mine if row.shape == shape and not is_hosts(row)]
            kept = [row for row in mine if row.shape != shape]
            unseen = fit(kept, [group], parameters) if left_out else parameters
            for row in left_out:
                before = abs(log(formerly(row) / row.seconds))
                errors[row.kind].append((before, error(row, parameters), error(row, unseen)))
    table: list[list[results.Cell]] = []
    for kind, found_ in [*sorted(errors.items()), ("all", [one for some in errors.values() for one in some])]:
        figures = [cell for column in zip(*found_, strict=True) for cell in summarized(column)]
        table.append([kind, len(found_), *figures])
    columns = [
        "kind",
        "operations",
        "four shares: median",
        "four shares: worst",
        "fitted: median",
        "fitted: worst",
        "left out: median",
    ]
    columns.append("left out: worst")
    results.store(
        "clock_fit",
        title="The clock's curves beside the operations of an H200: factors by which they are wrong",
        columns=columns,
        rows=table,
        formats=dict.fromkeys(columns[2:], ".2f"),
        unit="a factor",
        spread="left out: predicted by curves fitted without this shape; four shares: the clock until 2026-11-26",
        command="python lab/studies/clock_fit.py",
    )


if __name__ == "__main__":
    main()

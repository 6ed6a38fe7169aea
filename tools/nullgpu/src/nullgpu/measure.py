"""Measure this machine's GPU, and write a file for --clock: `nullgpu measure --out my_gpu.toml`.

It times some dozens of operations with random inputs and a cold L2 cache, and fits the curves of their kinds to them,
beginning with an H200's. It takes at most 40 seconds.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import curves, gpus
from .curves import Attention, BatchNorm, Convolution, Moved, Product, Work, family
from .fit import Timed, fitted

SECONDS = 40.0
"""that measuring takes at most"""
REPETITIONS = 5
L2 = 2**28
"""bytes that are written before each repetition, more than any L2 cache holds"""
TFLOP = 1e12
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRODUCTS = ((512, 512, 512), (2048, 768, 768), (2048, 2048, 2048), (12288, 3072, 768), (4096, 4096, 4096))
ATTENTION = ((12, 12, 1024, 64, True), (4, 16, 2048, 128, True), (32, 6, 256, 64, False))
"""samples, heads, positions, width of a head, causal"""
IMAGES = ((64, 3, 64, 224, 7, 2), (64, 64, 64, 56, 3, 1), (64, 128, 128, 28, 3, 1), (64, 256, 512, 14, 3, 2))
"""samples, channels in and out, edge, edge of the kernel, stride"""
VOLUMES = ((8, 4, 32, 64, 3, 1), (8, 32, 64, 32, 3, 1), (8, 128, 128, 16, 3, 1))
NORMS = ((64, 64, 56), (64, 256, 28))
"""samples, channels, edge"""
TOKENS = ((4096, 768), (16384, 4096))
Passes = Iterator[tuple[str, list[Work], Callable[[], object]]]
"""the curve, the kernels one after the other, and what launches them"""


def main(arguments: list[str]) -> int:
    """Measure, write the file, say what was found; return the exit status."""
    parser = argparse.ArgumentParser(prog="nullgpu measure", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("my_gpu.toml"), help="file to write (default: my_gpu.toml)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"most seconds (default: {SECONDS:g})")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("nullgpu: error: measure needs a GPU, and PyTorch sees none here", file=sys.stderr)
        return 2
    if not options.out.absolute().parent.is_dir():
        print(f"nullgpu: error: --out {options.out}: there is no folder {options.out.parent}", file=sys.stderr)
        return 2
    options.out.write_text(measured(options.seconds))
    print(f"nullgpu: written: {options.out}. Use it with nullgpu --clock {options.out} python ...")
    return 0


class Timer:
    """Times operations until its time is over."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.cold = torch.empty(L2 // 4, device="cuda")

    def seconds(self, run: Callable[[], object], is_needed: bool) -> float | None:
        """Return the median seconds of an operation on the GPU.

        None if the time is over and the operation is not needed, or if the GPU cannot do it.
        """
        if time.perf_counter() > self.end and not is_needed:
            return None
        try:
            run()
            torch.cuda.synchronize()
            times = []
            for _ in range(REPETITIONS):
                for _ in range(4):  # so the host runs ahead, and its launches are not timed
                    self.cold.zero_()
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                run()
                ended.record()
                torch.cuda.synchronize()
                times.append(1e-3 * began.elapsed_time(ended))
            return median(times)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            print(f"nullgpu: left out: {str(error).splitlines()[0]}", file=sys.stderr)
            return None


def measured(seconds: float) -> str:
    """Return the file of this machine's GPU."""
    timer = Timer(seconds)
    known = like()
    figures = gpus.read(known) if known else gpus.of_sm(10 * major() + minor())
    figures.setdefault("clock", gpus.read("a100")["clock"])  # a GPU that no file knows: peaks are measured below
    figures["name"] = torch.cuda.get_device_name().removeprefix("NVIDIA ") if not known else figures["name"]
    own = hardware()
    clock = {"launch": launch(), "shortest": shortest(), **transfers()}
    rows, peaks, bandwidth = timed(timer)
    if not known:
        figures["clock"]["peak"] = peaks
        own["bandwidth"] = bandwidth
    gpu = gpus.curves_of(gpus.merged(figures, own | {"clock": clock}))
    gpu = replace(gpu, measured={})
    base = curves.the_measured()["parameters"]
    found = {group: fitted(gpu, group, mine, base[group]) for group, mine in rows.items()}
    return text(known, figures, own, clock, found)


def major() -> int:
    """Return the first number of the compute capability."""
    return torch.cuda.get_device_capability()[0]


def minor() -> int:
    """Return the second number of the compute capability."""
    return torch.cuda.get_device_capability()[1]


def like() -> str:
    """Return the name of the GPU's file if there is one with a clock; "" if not."""
    words = torch.cuda.get_device_name().upper().replace("-", " ").split()
    for file in gpus.FOLDER.glob("*.toml"):
        if file.stem.upper() in words and "clock" in gpus.read(file.stem):
            return file.stem
    return ""


def hardware() -> dict[str, float]:
    """Return the figures that CUDA gives."""
    it = torch.cuda.get_device_properties(0)
    return {
        "sm": 10 * it.major + it.minor,
        "gb": round(it.total_memory / 2**30, 2),
        "multiprocessors": it.multi_processor_count,
        "l2_cache": it.L2_cache_size // 2**20,
    }


def launch() -> float:
    """Return the seconds that the driver keeps the host busy for a launch."""
    trials = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(300):
            torch.cuda._sleep(1)
        trials.append((time.perf_counter() - began) / 300)
    return min(trials)


def shortest() -> float:
    """Return the seconds from the start of the shortest kernel to the start of the next one."""
    x, large, number = torch.zeros(1, device="cuda"), random(4096, 4096), 200
    trials = []
    for _ in range(3):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(6):  # many milliseconds, in which the host puts the others into the queue
            large @ large
        began.record()
        for _ in range(number):
            x.add_(1)
        ended.record()
        torch.cuda.synchronize()
        trials.append(1e-3 * began.elapsed_time(ended) / number)
    return min(trials)


def transfers() -> dict[str, float]:
    """Return the bytes/s of copies to the GPU, from pinned and from pageable memory."""
    found, size = {}, 2**26
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name in ("pinned", "pageable"):
        on_cpu = torch.zeros(size, dtype=torch.uint8, pin_memory=name == "pinned")
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            on_gpu.copy_(on_cpu)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        found[name] = size / min(times)
    return found


def timed(timer: Timer) -> tuple[dict[str, list[Timed]], dict[str, float], float]:
    """Return what was timed of each curve, the largest FLOP/s of each format, and the largest bytes/s."""
    rows: defaultdict[str, list[Timed]] = defaultdict(list)
    peaks = dict.fromkeys(DTYPES, 0.0)
    bandwidth = 0.0
    for group, works, run in operations():
        seconds = timer.seconds(run, group == "elements" or isinstance(works[0], Product))
        if seconds is None:
            continue
        rows[group].append(Timed(group, works, seconds))
        first = works[0]
        if isinstance(first, Product):
            flops = 2 * first.batch * first.m * first.n * first.k
            peaks[first.format] = max(peaks[first.format], flops / seconds)
        if group == "elements" and isinstance(first, Moved):
            bandwidth = max(bandwidth, first.moved / seconds)
    # A format that this GPU lacks is computed as fp32.
    return dict(rows), {name: peak or peaks["fp32"] for name, peak in peaks.items()}, bandwidth


def operations() -> Passes:
    """Yield all operations, the most telling ones first."""
    formats = [name for name in DTYPES if name in ("fp32", "fp16") or major() >= 8]
    for makers in (products, memory, attentions, convolutions, norms):
        for number_format in formats:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = number_format == "tf32"
            yield from makers(number_format)
    torch.backends.cuda.matmul.allow_tf32 = False


def random(*shape: int, number_format: str = "fp32") -> Tensor:
    """Return random numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=DTYPES[number_format])


def products(number_format: str) -> Passes:
    """Yield products of matrices."""
    for m, n, k in PRODUCTS:
        a, b = random(m, k, number_format=number_format), random(k, n, number_format=number_format)
        work = Product(number_format, 1, m, n, k)
        yield f"product {family(number_format)}", [work], lambda a=a, b=b: a @ b  # type: ignore[misc]


def memory(number_format: str) -> Passes:
    """Yield operations that are limited by the memory."""
    if number_format == "tf32":
        return
    for rows, width in TOKENS:
        x = random(rows, width, number_format=number_format)
        size, elements = x.element_size(), x.numel()
        yield "elements", [Moved("elements", 3 * size * elements, elements)], lambda x=x: x + x  # type: ignore[misc]
        for kind, run in (("softmax", F.softmax), ("reductions", torch.sum)):
            moved = size * elements * (2 if kind == "softmax" else 1)
            yield kind, [Moved(kind, moved, elements)], lambda x=x, run=run: run(x, -1)  # type: ignore[misc]
        norm = partial_norm(x)
        yield "layer norm", [Moved("layer norm", 2 * size * elements, elements)], norm
        if number_format != "fp32":
            kind = "functions of 16 bits"
            yield kind, [Moved(kind, 2 * size * elements, elements)], lambda x=x: F.gelu(x)  # type: ignore[misc]


def partial_norm(x: Tensor) -> Callable[[], object]:
    """Return what launches a layer norm."""
    width = x.shape[-1]
    return lambda: F.layer_norm(x, (width,))


def attentions(number_format: str) -> Passes:
    """Yield attention, forward and backward."""
    if number_format == "tf32":
        return
    precision = "fp32" if number_format == "fp32" else "16 bits"
    for samples, heads, positions, width, causal in ATTENTION:
        shape = (samples, heads, positions, width)
        q, k, v, grad = (random(*shape, number_format=number_format) for _ in range(4))
        for it in (q, k, v):
            it.requires_grad_()

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        for direction, run in (("forward", forward), ("backward", backward_of(forward, (q, k, v), grad))):
            work = Attention(
                number_format, direction == "backward", samples * heads, positions, positions, width, causal
            )
            yield f"attention {precision} {direction}", [work], run


def convolutions(number_format: str) -> Passes:
    """Yield convolutions of images and of volumes, forward and backward, of images in both layouts."""
    for dimensions, shapes, function in ((2, IMAGES, F.conv2d), (3, VOLUMES, F.conv3d)):
        for shape in shapes:
            for last in (False, True) if dimensions == 2 else (False,):
                yield from convolution(number_format, dimensions, shape, function, last)


def convolution(
    number_format: str, dimensions: int, shape: tuple[int, ...], function: Callable[..., Tensor], last: bool
) -> Passes:
    """Yield a convolution, forward and backward."""
    samples, channels, outputs, edge, kernel, stride = shape
    x = random(samples, channels, *[edge] * dimensions, number_format=number_format)
    weight = random(outputs, channels, *[kernel] * dimensions, number_format=number_format)
    if last:
        x, weight = (it.to(memory_format=torch.channels_last) for it in (x, weight))
    x.requires_grad_(channels > curves.FEW)
    weight.requires_grad_()

    def forward() -> Tensor:
        return function(x, weight, stride=stride, padding=kernel // 2)

    y = forward()
    inputs = [it for it in (x, weight) if it.requires_grad]
    for run, gradients in ((forward, 0), (backward_of(forward, inputs, torch.randn_like(y)), len(inputs))):
        work = Convolution(
            number_format, dimensions, gradients, last, channels, outputs, 1, prod(y.shape[2:]), samples,
            kernel**dimensions, x.numel() * x.element_size(), y.numel() * y.element_size(),
        )  # fmt: skip
        yield f"convolution {dimensions}-D {family(number_format)}", [work], run


def norms(number_format: str) -> Passes:
    """Yield batch norms, forward and backward, in both layouts."""
    if number_format == "tf32":
        return
    half = number_format in curves.HALF
    for samples, channels, edge in NORMS:
        for last in (False, True):
            layer = nn.BatchNorm2d(channels, device="cuda")
            x = random(samples, channels, edge, edge, number_format=number_format)
            x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()

            def forward(layer: nn.Module = layer, x: Tensor = x) -> Tensor:
                return layer(x)

            grad = torch.randn_like(x)
            for run, direction in ((forward, "forward"), (backward_of(forward, [x, layer.weight], grad), "backward")):
                work = BatchNorm(half, direction == "backward", last, channels, x.numel(), x.element_size())
                group = f"batch norm {'last' if last else 'first'} {direction} {'16 bits' if half else '32 bits'}"
                yield group, [work], run


def backward_of(forward: Callable[[], Tensor], inputs: object, grad: Tensor) -> Callable[[], object]:
    """Return what launches the backward pass of a function."""
    y = forward()
    return lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)


def text(
    known: str,
    figures: dict[str, object],
    own: dict[str, float],
    clock: dict[str, float],
    found: dict[str, dict[str, float]],
) -> str:
    """Return the file as TOML."""
    clock_of = figures["clock"]
    assert isinstance(clock_of, dict)
    lines = [f"# {torch.cuda.get_device_name()}, measured by nullgpu measure with torch {torch.__version__}"]
    if known:
        lines.append(f'like = "{known}"')
    else:
        others = [name for name in gpus.HARDWARE if name not in own]
        lines += [f'name = "{figures["name"]}"', *(f"{name} = {figures[name]}" for name in others)]
    lines += [f"{name} = {value:.6g}" for name, value in own.items()]
    lines += ["", "[clock]", *(f"{name} = {value:.4g}" for name, value in clock.items())]
    if not known:
        lines.append(f"peak = {inline(clock_of['peak'])}  # FLOP/s that a product of matrices reached")
        lines += [f"{where} = {inline(clock_of[where])}  # not measured" for where in ("inside", "between")]
    lines += ["", "[clock.measured]", 'by = "nullgpu measure"']
    lines += [f'curves."{group}" = {inline(parameters)}' for group, parameters in sorted(found.items())]
    return "\n".join([*lines, ""])


def inline(table: dict[str, float]) -> str:
    """Return a table of numbers in one line of TOML."""
    quoted = {name if name.isidentifier() else f'"{name}"': value for name, value in table.items()}
    return f"{{ {', '.join(f'{name} = {value:.6g}' for name, value in quoted.items())} }}"

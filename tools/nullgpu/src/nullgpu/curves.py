"""How long operations take on a GPU, by their kind and size: curves whose parameters were fitted to an H200.

The parameters are in curves.json, which a study of the workshop writes from the operations that an
H200 was timed with. Most of them are shares of the GPU's peaks, so the curves hold for another GPU with its own peaks;
but then they are scaled, and not measured. Bytes and numbers are per call; times are in seconds.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "curves.json"
Parameters = Mapping[str, float]
HALF = ("bf16", "fp16")
TILE = 128
"""edge of the part of a matrix that one multiprocessor computes"""
FEW = 4
"""channels of an input, such as colors, for which cuDNN has slow kernels only"""
DEEP = 1024
"""rows of the second matrix that a multiprocessor takes at least, if several share a tile of the product"""
FITS = 100_000
"""numbers of a channel that cuDNN's batch norm keeps on one multiprocessor"""
MANY = 256
"""channels with which it fills the GPU if they do not fit"""
MOST = 0.8
"""share of the peak that kernels without matrix units attain at most, about that of products in fp32"""


@dataclass(frozen=True)
class Gpu:
    """The figures of a GPU that the curves need."""

    name: str
    peak: Mapping[str, float]
    """FLOP/s by number format"""
    bandwidth: float
    """bytes/s of its memory"""
    multiprocessors: int
    clock_rate: float
    """MHz"""
    shortest: float
    """seconds of the shortest kernel"""
    measured: Mapping[str, Parameters] = field(default_factory=dict)
    """parameters of the curves that were fitted to kernels of this GPU, or "derived" from these"""


@dataclass(frozen=True)
class Product:
    """A product of matrices: batch x (m x k) times (k x n)."""

    format: str
    batch: float
    m: float
    n: float
    k: float
    aligned: bool = True
    """whether each row of all matrices begins at a multiple of 16 bytes, as the fast kernels need it"""


@dataclass(frozen=True)
class Attention:
    """Attention that does not store its scores, or its backward pass."""

    format: str
    backward: bool
    sequences: float
    """samples x heads"""
    queries: float
    keys: float
    width: float
    """of a head"""
    causal: bool


@dataclass(frozen=True)
class Convolution:
    """A convolution, or some of the products of its backward pass."""

    format: str
    dimensions: int
    backward: int
    """number of gradients, of 2; 0: forward"""
    channels_last: bool
    channels: float
    """of the input, in each group"""
    outputs: float
    """channels of the output, in each group"""
    groups: float
    positions: float
    """of the output, of one sample"""
    samples: float
    kernel: float
    """elements of the kernel"""
    input_bytes: float
    output_bytes: float
    transposed: bool = False
    """whether it is a transposed one, whose backward pass is the convolution"""
    searched: bool = False
    """whether cuDNN has tried its algorithms (cudnn.benchmark), and does not guess"""


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm in training, or its backward pass."""

    half: bool
    backward: bool
    channels_last: bool
    channels: float
    elements: float
    size: int
    """bytes of an element"""
    mixed: bool = False
    """whether the weights are float32 and the input is not: cuDNN's kernels, as under autocast"""


@dataclass(frozen=True)
class Moved:
    """Any other operation: it moves bytes, and does something with each element."""

    kind: str
    moved: float
    elements: float
    launches: int = 1
    rows: float = 0
    """that a norm takes one after the other"""


Work = Product | Attention | Convolution | BatchNorm | Moved


@functools.cache
def the_measured() -> dict[str, Any]:
    """Return the GPU that the curves were fitted to ("gpu"), and their parameters ("parameters")."""
    return json.loads(FILE.read_text())


def measured_on() -> str:
    """Return the name of the GPU whose operations the curves were fitted to."""
    return the_measured()["gpu"]["name"]


class Curves:
    """The time of each kind of work on one GPU."""

    def __init__(self, gpu: Gpu, parameters: Mapping[str, Parameters] | None = None) -> None:
        base = the_measured()
        self.parameters = {**base["parameters"], **gpu.measured} if parameters is None else parameters
        self.gpu, self.is_base = gpu, gpu.name == base["gpu"]["name"]
        of, peak = base["gpu"], base["gpu"]["peak"]
        self.slower = of["multiprocessors"] * of["clock_rate"] / (gpu.multiprocessors * gpu.clock_rate)
        """how many times as long its multiprocessors need for the same number of instructions as an H200's"""
        self.per_clock = {it: self.slower / (peak[it] / gpu.peak[it]) for it in peak}
        """how much of its peak the same number of instructions costs, in comparison with an H200"""
        self.unaligned: float = base["parameters"]["product 16 bits"].get("unaligned", 1.0)
        """share of the speed that products of rows have that begin anywhere, where it was not fitted"""
        self.floor = 1e-6 * gpu.shortest / of["shortest"]
        """seconds for a microsecond of a fixed cost"""

    def name(self, work: Work) -> str:
        """Return the name of the curve of this work."""
        if isinstance(work, Product):
            return f"product {family(work.format)}"
        direction = "backward" if getattr(work, "backward", False) else "forward"
        if isinstance(work, Attention):
            return f"attention {'16 bits' if work.format in HALF else 'fp32'} {direction}"
        if isinstance(work, Convolution):
            return f"convolution {work.dimensions}-D {family(work.format)}"
        if isinstance(work, BatchNorm):
            if work.mixed and work.half and not work.channels_last:
                return f"batch norm mixed {direction}"
            layout = "last" if work.channels_last else "first"
            return f"batch norm {layout} {direction} {'16 bits' if work.half else '32 bits'}"
        return work.kind if work.kind in self.parameters else "elements"

    def is_own(self, work: Work) -> bool:
        """Whether the curve of this work was fitted to kernels of this GPU; not if it was only derived from others."""
        own = self.gpu.measured.get(self.name(work))
        return self.is_base or (own is not None and "derived" not in own)

    def seconds(self, work: Work) -> float:
        """Return how long it takes."""
        if isinstance(work, Product):
            return self.product(work)
        if isinstance(work, Attention):
            return self.attention(work)
        if isinstance(work, Convolution):
            return self.convolution(work)
        return self.batch_norm(work) if isinstance(work, BatchNorm) else self.moved(work)

    def product(self, it: Product) -> float:
        """A product attains its share of the peak if it has enough tiles for all multiprocessors."""
        p = self.parameters[self.name(it)]
        size = 2 if it.format in HALF else 4
        tiles = it.batch * max(it.m / TILE, 0.25) * max(it.n / TILE, 0.25)
        tiles *= max(1.0, min(it.k / DEEP, self.gpu.multiprocessors / tiles))  # several sum parts of a tile
        filled = tiles / (tiles + p["tiles"] * self.gpu.multiprocessors)
        arithmetic = 2 * it.batch * it.m * it.n * it.k / (self.gpu.peak[it.format] * p["share"] * filled)
        traffic = size * it.batch * (it.m * it.k + it.k * it.n + it.m * it.n) / (self.gpu.bandwidth * p["memory"])
        unaligned = p.get("unaligned", self.unaligned if it.format in HALF else 1.0)
        slower = 1.0 if it.aligned else 1 / unaligned
        return p["floor"] * self.floor + slower * max(arithmetic, traffic)

    def attention(self, it: Attention) -> float:
        """Each score costs an exponential, beside products of the head's width."""
        exact = it.format not in HALF
        p = self.parameters[self.name(it)]
        scores = it.sequences * it.queries * it.keys
        if it.causal:  # whole tiles on the diagonal are computed
            scores *= 0.5 * (1 + p["tile"] / max(it.keys, p["tile"]))
        # PyTorch's kernel for fp32 makes three products of TF32 on matrix units (torch/include/ATen/native/
        # transformers/cuda/mem_eff_attention/gemm_kernel_utils.h, for compute capability 8.0 and newer).
        peak = max(self.gpu.peak["fp32"], self.gpu.peak["tf32"] / 3) if exact else self.gpu.peak[it.format]
        width = 64 * -(-it.width // 64)  # heads are padded
        products = scores * width * (10 if it.backward else 4) / (peak * p["share"])
        exponentials = scores * p["score"] * 1e-12 * self.slower
        filled = it.queries * it.sequences / (it.queries * it.sequences + p["rows"] * self.gpu.multiprocessors)
        return p["floor"] * self.floor + (products + exponentials) / filled

    def convolution(self, it: Convolution) -> float:
        """A convolution is a product; with matrix units, and channels first, its tensors are transposed before it."""
        p = self.parameters[self.name(it)]
        per_pass = 2 * it.samples * it.positions * it.outputs * it.channels * it.groups * it.kernel
        peak, passes = self.gpu.peak[it.format], it.backward or 1
        moved = it.input_bytes + it.output_bytes
        traffic = passes * moved / (self.gpu.bandwidth * p["memory"])
        fixed = passes * p["floor"] * self.floor
        if it.groups > 1 and it.channels < 8:  # depthwise: without matrix units (not measured)
            return fixed + max(per_pass * passes / (self.gpu.peak["fp32"] * 0.2), 2 * traffic)
        # A tensor has as many bytes for each channel before and after it if each position stays.
        strided = it.input_bytes * it.outputs > 1.5 * it.output_bytes * it.channels
        narrow = min(it.channels, it.outputs)
        # Few channels cost instructions rather than arithmetic: a GPU with less of a peak loses less by them.
        per_clock, own = self.per_clock[it.format], p["backward" if it.backward else "forward"]
        share = own / (1 + p["channels"] / narrow * per_clock)
        if it.channels <= FEW:
            share = min(p["few"] * (p["few in fp16"] if it.format == "fp16" else 1.0) / per_clock, max(p["few"], own))
        elif strided:
            share *= p["strided"]
        each = [peak * share] * passes
        if "guess" in p and it.channels > FEW and not it.searched:  # cuDNN's guess has no matrix units
            guess = min(peak * p["guess"] / per_clock, self.gpu.peak["fp32"] * MOST)
            largest = (4096, 512) if it.transposed and it.backward else (200 if it.backward else 1000, 0)
            each = [guess if it.positions <= most else one for one, most in zip(each, largest, strict=False)]
        arithmetic = sum(per_pass / attained for attained in each)
        transposed = 0.0
        if not it.channels_last and it.format != "fp32" and (it.kernel > 1 or strided):
            share = self.parameters["convolution 2-D 16 bits"]["transpose"]
            transposed = passes * 2 * moved / (self.gpu.bandwidth * share)
        return fixed + max(arithmetic, traffic) + transposed

    def batch_norm(self, it: BatchNorm) -> float:
        """With channels first, each multiprocessor takes a channel, so few channels do not fill the GPU."""
        p = self.parameters[self.name(it)]
        if "large" in p:
            fits = it.elements <= FITS * it.channels
            element = p["element"] if fits else p["large"] * max(1.0, MANY / it.channels) ** p["idle"]
            return p["floor"] * self.floor + it.elements * element * 1e-12 * self.slower
        idle = 1.0 if it.channels_last else max(1.0, self.gpu.multiprocessors / it.channels) ** p["idle"]
        elements = it.elements * p["element"] * 1e-12 * idle * self.slower
        traffic = it.elements * it.size * (5 if it.backward else 3) / (self.gpu.bandwidth * 0.9)
        return p["floor"] * self.floor + max(elements, traffic)

    def moved(self, it: Moved) -> float:
        """A kernel moves its bytes at a share of the bandwidth, unless its instructions for an element take longer."""
        p = self.parameters[self.name(it)]
        traffic = it.moved / (self.gpu.bandwidth * p["share"])
        elements = it.elements * p.get("element", 0) * 1e-12 * self.slower
        fixed = max(p["floor"], it.launches * self.parameters["elements"]["floor"])
        rows = it.rows * p.get("row", 0) * 1e-9 * self.slower
        return fixed * self.floor + rows + max(traffic, elements)


def family(number_format: str) -> str:
    """Return the name of the formats that have their parameters in common."""
    return "16 bits" if number_format in HALF else number_format

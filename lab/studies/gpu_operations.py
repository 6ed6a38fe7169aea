"""Measure single operations on this GPU by shape and number format: products, convolutions, attention and others.

    python lab/studies/gpu_operations.py --folder DIR

DIR/operations.json has the median microseconds of each, forward and backward apart, with random inputs and a cold L2
cache. It is written again every few seconds; when it is called again, it measures what is missing.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lab.flags import Parser  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402
from workshop.jsonfile import read_json, write_json  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
MIB = 2**20
L2 = 256 * MIB
"""bytes that are written before each repetition, more than any L2 cache holds"""
REPETITIONS, MOST, TOGETHER = 7, 60, 0.03
"""fewest and most repetitions, and seconds that they take together if they can"""
STORE_EVERY = 3.0
"""seconds"""
LARGEST_OF_TINY = 8
"""with --tiny, no number of a shape is larger"""

SQUARE = [(size, size, size) for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]
LAYERS = ((768, 768), (3072, 768), (768, 3072), (4096, 4096), (14336, 4096))
THIN = [(m, n, k) for m in (32, 256, 2048, 12288) for n, k in LAYERS]
WIDE = [(12288, 50304, 768), (8192, 11008, 4096), (4096, 32000, 4096)]
BATCHED = ((96, 197, 64, 197), (144, 1024, 1024, 64), (64, 512, 512, 64), (1024, 64, 64, 64))
ATTENTION = ((12, 12, 1024, 64), (4, 32, 2048, 128), (1, 32, 8192, 128), (64, 6, 256, 64), (16, 8, 4050, 48))
"""samples, heads, positions, head dimension"""
CONV2D = [
    (256, 3, 64, 224, 7, 2),
    (256, 64, 64, 56, 3, 1),
    (256, 64, 256, 56, 1, 1),
    (256, 128, 128, 28, 3, 1),
    (256, 256, 256, 14, 3, 1),
    (256, 512, 512, 7, 3, 1),
    (256, 1024, 2048, 14, 1, 2),
    (64, 64, 64, 32, 3, 1),
    (128, 32, 64, 26, 3, 1),
    (8, 128, 128, 28, 3, 1),
]
"""samples, channels in and out, edge, edge of the kernel, stride"""
DEPTHWISE = [(64, 96, 96, 112, 3, 2), (64, 144, 144, 56, 3, 1), (64, 384, 384, 14, 3, 1), (64, 192, 192, 56, 7, 1)]
"""the same; of MobileNetV2 and ConvNeXt"""
CONV3D = [
    (64, 4, 64, 64, 4, 2),
    (64, 64, 128, 32, 4, 2),
    (64, 128, 256, 16, 4, 2),
    (64, 256, 512, 8, 4, 2),
    (16, 64, 64, 32, 3, 1),
]
TRANSPOSED = {
    2: [(64, 256, 128, 14, 4, 2), (64, 128, 64, 28, 4, 2)],
    3: [(64, 512, 128, 8, 4, 2), (64, 128, 64, 16, 4, 2)],
}
IMAGES = ((256, 64, 112), (256, 256, 56), (256, 2048, 7))
TOKENS = ((12288, 768), (8192, 4096), (2048, 1024))
RECURRENT = ((64, 128, 512, 2), (32, 35, 1500, 2), (128, 500, 64, 1))
"""samples, steps, width, layers"""
BAGS = ((4096, 20, 1_000_000, 64), (8192, 1, 1_000_000, 128))
"""bags, rows in each, rows of the table, width; of a recommender"""
WEIGHTS = [rows for _ in range(37) for rows in (768, 3072, 3, 512)]
"""rows of 768 numbers, together 124 million weights in 148 tensors, as GPT-2 has"""
WIDTH = 768


class Calibration:
    """Measures operations, and keeps what was measured before."""

    def __init__(self, file: Path, tiny: bool) -> None:
        self.file, self.tiny = file, tiny
        before = read_json(file)
        self.rows: list[dict[str, Any]] = before.get("rows", [])
        self.done = {self.key(row) for row in self.rows}
        self.seconds = before.get("seconds", 0.0)
        self.began = self.stored = time.perf_counter()
        self.device = torch.device("cuda")
        self.cold = torch.empty(self.size(L2 // 4), device=self.device)

    @staticmethod
    def key(row: dict[str, Any]) -> tuple[str, ...]:
        """Return what names a row."""
        return tuple(str(row.get(name, "")) for name in ("op", "dtype", "shape", "layout"))

    def size(self, number: int) -> int:
        """Return a number of a shape, small with --tiny."""
        return min(number, LARGEST_OF_TINY) if self.tiny else number

    def shapes(self, shapes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return shapes, small and each once with --tiny."""
        return list(dict.fromkeys(tuple(map(self.size, shape)) for shape in shapes))

    def random(self, *shape: int, dtype: str = "fp32", layout: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Return random numbers on the GPU."""
        return torch.randn(*shape, device=self.device, dtype=DTYPES[dtype]).to(memory_format=layout)

    def store(self) -> None:
        """Write what was measured."""
        gpu = torch.cuda.get_device_properties(0)
        found: dict[str, Any] = {"gpu": gpu.name, "sms": gpu.multi_processor_count, "memory": gpu.total_memory}
        found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        found |= {"seconds": self.seconds + time.perf_counter() - self.began, "rows": self.rows}
        write_json(self.file, found)
        self.stored = time.perf_counter()

    def add(self, **row: Any) -> None:  # noqa: ANN401
        """Keep a row, and write all now and then."""
        self.rows.append(row)
        self.done.add(self.key(row))
        if time.perf_counter() - self.stored > STORE_EVERY:
            self.store()

    def note(
        self,
        op: str,
        dtype: str,
        shape: Sequence[object],
        run: Callable[[], object],
        flops: float = 0.0,
        moved: float = 0.0,
        **more: str,
    ) -> None:
        """Measure an operation, unless it is done.

        Args:
            op: its name.
            dtype: its number format.
            shape: the numbers that say how large it is.
            run: calls it.
            flops: floating-point operations.
            moved: bytes that it reads and writes at least.
            more: for example its layout.
        """
        row: dict[str, Any] = {"op": op, "dtype": dtype, "shape": list(shape), **more}
        if self.key(row) in self.done:
            return
        try:
            self.add(**row, us=1e6 * self.median(run), flops=flops, bytes=moved)
        except (RuntimeError, ValueError) as error:
            self.add(**row, error=repr(error)[:200])

    def median(self, run: Callable[[], object]) -> float:
        """Return the median of the seconds on the GPU."""
        repetitions = [self.start(run) for _ in range(3)]  # the first ones choose an algorithm
        torch.cuda.synchronize()
        one = max(repetitions[-1][0].elapsed_time(repetitions[-1][1]) / 1e3, 1e-6)
        times = 1 if self.tiny else max(REPETITIONS, min(MOST, int(TOGETHER / one)))
        repetitions = [self.start(run, cold=one < 2e-3) for _ in range(times)]
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) / 1e3 for begin, end in repetitions)[times // 2]

    def start(self, run: Callable[[], object], cold: bool = False) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch the operation once between two events."""
        if cold:
            self.cold.zero_()  # evicts its inputs from the L2 cache, and lets the host get ahead of the GPU
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        return begin, end

    def backward(
        self,
        op: str,
        dtype: str,
        shape: Sequence[object],
        forward: Callable[[], Tensor],
        inputs: Sequence[Tensor],
        flops: float = 0.0,
        moved: float = 0.0,
        **more: str,
    ) -> None:
        """Measure the gradients of some inputs, unless it is done; ``forward`` returns what they are gradients of."""
        row: dict[str, Any] = {"op": op, "dtype": dtype, "shape": list(shape), **more}
        if self.key(row) in self.done:
            return
        try:
            output = forward()
        except RuntimeError as error:
            self.add(**row, error=repr(error)[:200])
            return
        gradient = torch.randn_like(output)
        wanted = [one for one in inputs if one.requires_grad]

        def run() -> None:
            torch.autograd.grad(output, wanted, gradient, retain_graph=True)

        self.note(op, dtype, shape, run, flops, moved, **more)


def allow_tf32(allowed: bool) -> None:
    """Let products and convolutions of float32 round their inputs to TF32, or not."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def launches(to: Calibration) -> None:
    """Measure what the host needs to launch, to wait, and to launch a graph."""
    one = torch.zeros(1, device=to.device)
    to.note("floor", "fp32", [1], lambda: one.add_(1))
    if ("host_launch_add_", "", "", "") in to.done:
        return
    counts = (20, 3, 2) if to.tiny else (2000, 300, 50)
    began = time.perf_counter()
    for _ in range(counts[0]):
        one.add_(1)
    to.add(op="host_launch_add_", us=(time.perf_counter() - began) / counts[0] * 1e6)
    began = time.perf_counter()
    for _ in range(counts[1]):
        one.item()
    to.add(op="host_item", us=(time.perf_counter() - began) / counts[1] * 1e6)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one.add_(1)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(200):
                one.add_(1)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(counts[2]):
        graph.replay()
    torch.cuda.synchronize()
    to.add(op="graph_of_200_add_", us=(time.perf_counter() - began) / counts[2] * 1e6)


def memory(to: Calibration) -> None:
    """Measure operations that are limited by memory, and copies between host and GPU."""
    for mib in (0.25, 1, 4, 16, 64, 256, 1024):
        n = to.size(int(mib * MIB / 4))
        x, y = to.random(n), to.random(n)
        half = x.bfloat16()
        to.note("copy", "fp32", [n], partial(y.copy_, x), 0, 8.0 * n)
        to.note("add", "fp32", [n], partial(torch.add, x, x, out=y), 0, 8.0 * n)
        to.note("relu", "fp32", [n], partial(F.relu, x), 0, 8.0 * n)
        to.note("sum", "fp32", [n], partial(torch.sum, x), 0, 4.0 * n)
        to.note("relu", "bf16", [n], partial(F.relu, half), 0, 4.0 * n)
        to.note("gelu", "bf16", [n], partial(F.gelu, half), 0, 4.0 * n)
        to.note("cast", "fp32->bf16", [n], partial(x.to, torch.bfloat16), 0, 6.0 * n)
        to.note("dropout", "bf16", [n], partial(F.dropout, half, 0.1), 0, 5.0 * n)
        if mib <= 256:
            pinned, pageable = torch.empty(n, pin_memory=True), torch.empty(n)
            to.note("h2d_pinned", "fp32", [n], partial(x.copy_, pinned, non_blocking=True), 0, 4.0 * n)
            to.note("h2d_pageable", "fp32", [n], partial(x.copy_, pageable), 0, 4.0 * n)
            to.note("d2h_pinned", "fp32", [n], partial(pinned.copy_, x, non_blocking=True), 0, 4.0 * n)


def products(to: Calibration) -> None:
    """Measure products of matrices."""
    chosen = (
        *((dtype, SQUARE) for dtype in ("bf16", "tf32", "fp32")),
        ("fp16", SQUARE[3:7]),
        ("bf16", THIN + WIDE),
        ("tf32", THIN[::3]),
        ("fp32", THIN[::6]),
    )
    for dtype, shapes in chosen:
        allow_tf32(dtype == "tf32")
        for m, n, k in to.shapes(shapes):
            a, b = to.random(m, k, dtype=dtype), to.random(n, k, dtype=dtype)
            moved = a.element_size() * (m * k + n * k + m * n)
            to.note("mm", dtype, [m, n, k], partial(torch.matmul, a, b.t()), 2.0 * m * n * k, moved)
    for n, rows, inner, columns in to.shapes(BATCHED):
        a, b = to.random(n, rows, inner, dtype="bf16"), to.random(n, inner, columns, dtype="bf16")
        moved = 2.0 * n * (rows * inner + inner * columns + rows * columns)
        flops = 2.0 * n * rows * inner * columns
        to.note("bmm", "bf16", [n, rows, columns, inner], partial(torch.matmul, a, b), flops, moved)


def attention(to: Calibration) -> None:
    """Measure attention, with and without a causal mask."""
    for dtype in ("bf16", "fp32"):
        for n, heads, length, width in to.shapes(ATTENTION):
            if dtype == "fp32" and length > 4096:
                continue
            for causal in (True, False):
                q, k, v = (to.random(n, heads, length, width, dtype=dtype).requires_grad_() for _ in range(3))
                shape, flops = [n, heads, length, width, causal], 4.0 * n * heads * length * length * width

                def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal) -> Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                to.note("sdpa_forward", dtype, shape, run, flops)
                to.backward("sdpa_backward", dtype, shape, run, (q, k, v), 2.5 * flops)


def convolutions(to: Calibration) -> None:
    """Measure convolutions: full, of single channels (depthwise), and transposed."""
    for dims, shapes, dtypes, layouts in (
        (2, CONV2D, ["bf16"], ["cl", "nchw"]),
        (2, CONV2D[::2], ["fp16"], ["cl"]),
        (2, CONV2D, ["tf32"], ["nchw"]),
        (2, CONV2D[1::2], ["fp32"], ["nchw"]),
        (3, CONV3D, ["bf16"], ["cl", "nchw"]),
        (3, CONV3D, ["fp16"], ["nchw"]),
        (3, CONV3D, ["tf32"], ["nchw"]),
        (3, CONV3D[1:4], ["fp32"], ["nchw"]),
    ):
        convolve(to, f"conv{dims}d", dims, shapes, dtypes, layouts)
    convolve(to, "depthwise2d", 2, DEPTHWISE, ["bf16", "tf32"], ["cl", "nchw"])
    for dims, shapes in TRANSPOSED.items():
        convolve(to, f"conv_transpose{dims}d", dims, shapes, ["bf16", "tf32"], ["cl", "nchw"])


def convolve(
    to: Calibration,
    op: str,
    dims: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    layouts: Sequence[str],
) -> None:
    """Measure one kind of convolution, forward and backward."""
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    transposed, depthwise = "transpose" in op, "depthwise" in op
    function: Callable[..., Tensor] = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    for dtype in dtypes:
        allow_tf32(dtype == "tf32")
        for n, inputs, outputs, edge, kernel, stride in to.shapes(shapes):
            groups = inputs if depthwise else 1
            edges, weight = dims * [edge], [outputs, inputs // groups, *dims * [kernel]]
            if transposed:
                weight[:2] = [inputs, outputs]
            options = {"stride": stride, "groups": groups, "padding": 1 if transposed else kernel // 2}
            for layout in layouts:
                form = last if layout == "cl" else torch.contiguous_format
                x = to.random(n, inputs, *edges, dtype=dtype, layout=form).requires_grad_(inputs > 4)
                w = to.random(*weight, dtype=dtype, layout=form).requires_grad_()
                shape = [n, inputs, outputs, edge, kernel, stride]

                def run(x: Tensor = x, w: Tensor = w, options: dict[str, int] = options) -> Tensor:
                    return function(x, w, **options)

                try:
                    y = run()
                except RuntimeError as error:
                    row = {"op": f"{op}_forward", "dtype": dtype, "shape": shape, "layout": layout}
                    if to.key(row) not in to.done:
                        to.add(**row, error=repr(error)[:200])
                    continue
                flops = 2.0 * (x.numel() * outputs if transposed else y.numel() * inputs // groups) * kernel**dims
                moved = x.element_size() * (x.numel() + w.numel() + y.numel())
                with torch.no_grad():
                    to.note(f"{op}_forward", dtype, shape, run, flops, moved, layout=layout)
                gradients = 2 if x.requires_grad else 1
                to.backward(f"{op}_backward", dtype, shape, run, (x, w), flops * gradients, 2 * moved, layout=layout)
                del x, w, y, run


def norms(to: Calibration) -> None:
    """Measure norms, softmax, pooling and the loss of a language model."""
    for dtype in ("bf16", "fp32"):
        for rows, width in to.shapes(TOKENS):
            x = to.random(rows, width, dtype=dtype).requires_grad_()
            w = torch.ones(width, device=to.device, dtype=DTYPES[dtype], requires_grad=True)
            size = x.element_size() * x.numel()

            def norm(x: Tensor = x, w: Tensor = w) -> Tensor:
                return F.layer_norm(x, (x.shape[-1],), w)

            to.note("layer_norm_forward", dtype, [rows, width], norm, 0, 2.0 * size)
            to.backward("layer_norm_backward", dtype, [rows, width], norm, (x, w), 0, 3.0 * size)
            to.note("softmax_forward", dtype, [rows, width], partial(F.softmax, x, -1), 0, 2.0 * size)
        for n, channels, edge in to.shapes(IMAGES):
            for layout, form in (("cl", torch.channels_last), ("nchw", torch.contiguous_format)):
                x = to.random(n, channels, edge, edge, dtype=dtype, layout=form).requires_grad_()
                norm2d = nn.BatchNorm2d(channels).to(to.device)
                shape, size = [n, channels, edge], x.element_size() * x.numel()
                more = {"layout": layout}
                to.note("batch_norm_forward", dtype, shape, partial(norm2d, x), 0, 3.0 * size, **more)
                inputs = (x, norm2d.weight, norm2d.bias)
                to.backward("batch_norm_backward", dtype, shape, partial(norm2d, x), inputs, 0, 5.0 * size, **more)
                to.note("max_pool2d", dtype, shape, partial(F.max_pool2d, x, 3, 2, 1), 0, 1.25 * size, **more)
                del x, norm2d, inputs
        rows, words = map(to.size, (12288, 50304))
        x, y = to.random(rows, words, dtype=dtype).requires_grad_(), torch.randint(words, (rows,), device=to.device)

        def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(x.float(), y)

        to.note("cross_entropy_forward", dtype, [rows, words], loss, 0, 4.0 * x.numel())
        to.backward("cross_entropy_backward", dtype, [rows, words], loss, (x,), 0, 4.0 * x.numel())
        del x, y, loss


def embeddings(to: Calibration) -> None:
    """Measure embeddings: of the tokens of a text, and of the bags of a recommender, with sparse gradients too."""
    rows, width, n = map(to.size, (50304, WIDTH, 12288))
    table = nn.Embedding(rows, width).to(to.device)
    chosen = torch.randint(rows, (n,), device=to.device)
    to.note("embedding_forward", "fp32", [n, width], partial(table, chosen), 0, 8.0 * n * width)
    moved = 4.0 * rows * width
    to.backward("embedding_backward", "fp32", [n, width], partial(table, chosen), (table.weight,), 0, moved)
    for bags, each, rows, width in to.shapes(BAGS):
        chosen = torch.randint(rows, (bags, each), device=to.device)
        for sparse in (False, True):
            bag = nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse).to(to.device)
            shape, more = [bags, each, rows, width], {"layout": "sparse" if sparse else "dense"}
            moved = 4.0 * bags * (each + 1) * width
            to.note("embedding_bag_forward", "fp32", shape, partial(bag, chosen), 0, moved, **more)
            inputs = (bag.weight,)
            to.backward("embedding_bag_backward", "fp32", shape, partial(bag, chosen), inputs, 0, moved, **more)


def optimizers(to: Calibration) -> None:
    """Measure updates of 124 million weights in 148 tensors."""
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "adam_foreach": lambda weights: torch.optim.Adam(weights, 1e-4, foreach=True),
        "adam_fused": lambda weights: torch.optim.Adam(weights, 1e-4, fused=True),
        "adamw_fused": lambda weights: torch.optim.AdamW(weights, 1e-4, fused=True),
        "sgd_foreach": lambda weights: torch.optim.SGD(weights, 1e-4, momentum=0.9, foreach=True),
        "sgd_fused": lambda weights: torch.optim.SGD(weights, 1e-4, momentum=0.9, fused=True),
    }
    for name, make in makers.items():
        weights = [nn.Parameter(to.random(to.size(rows), to.size(WIDTH))) for rows in WEIGHTS]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        count = sum(weight.numel() for weight in weights)
        shape = [count, len(weights)]
        to.note(name, "fp32", shape, make(weights).step, 0, (28.0 if "adam" in name else 20.0) * count)
        if name == "adam_foreach":
            to.note("clip_grad_norm", "fp32", shape, partial(nn.utils.clip_grad_norm_, weights, 1.0), 0, 12.0 * count)


def recurrent(to: Calibration) -> None:
    """Measure recurrent networks, forward and backward."""
    for dtype in ("fp32", "tf32", "bf16"):
        allow_tf32(dtype == "tf32")
        for kind, gates in (("LSTM", 4), ("GRU", 3)):
            for n, steps, width, layers in to.shapes(RECURRENT):
                make: Any = getattr(nn, kind)
                network = make(width, width, layers, batch_first=True).to(to.device, DTYPES[dtype])
                x = to.random(n, steps, width, dtype=dtype).requires_grad_()
                flops = 2.0 * n * steps * layers * 2 * gates * width * width
                shape, name = [n, steps, width, layers], kind.lower()

                def run(network: nn.Module = network, x: Tensor = x) -> Tensor:
                    return network(x)[0]

                to.note(f"{name}_forward", dtype, shape, run, flops)
                inputs = (x, *network.parameters())
                to.backward(f"{name}_backward", dtype, shape, run, inputs, 2 * flops)
                del network, x, inputs, run


PARTS = (launches, memory, products, attention, convolutions, norms, embeddings, optimizers, recurrent)


def main() -> None:
    """Measure all operations that are missing in the file."""
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder for operations.json")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="smallest shapes, for a null GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("this machine has no NVIDIA GPU")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    calibration = Calibration(arguments.folder / "operations.json", arguments.tiny == "true")
    before = len(calibration.rows)
    for part in PARTS:
        began = time.perf_counter()
        try:
            part(calibration)
        except torch.cuda.OutOfMemoryError as error:  # of a smaller GPU
            print(f"note: {part.__name__}: {str(error).splitlines()[0]}")
        torch.cuda.empty_cache()
        print(f"{part.__name__:15} {time.perf_counter() - began:6.1f} s")
    calibration.store()
    errors = [row for row in calibration.rows if "error" in row]
    for row in errors[:5]:
        print(f"note: {row['op']} {row['dtype']} {row['shape']}: {row['error']}")
    print(f"note: {len(calibration.rows)} operations, {before} of them before, {len(errors)} failed")


if __name__ == "__main__":
    run_reporting_user_errors(main)

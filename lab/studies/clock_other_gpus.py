"""Fit curves of the null GPU's clock to kernels that others have timed on an A100, an H100, an L4 and a T4.

    git clone https://github.com/sitar-lab/NeuSight                              # MIT license
    pip download --no-deps aiconfigurator-core==0.12.0                           # Apache-2.0
    unzip aiconfigurator_core-*.whl -d aiconfigurator
    pip install pyarrow
    python lab/studies/clock_other_gpus.py NeuSight aiconfigurator               # some minutes

It fits the parameters of each curve for which there are kernels, beginning with those of the H200 (curves.json), and
writes them into the files of the GPUs. Its table has the errors on kernels that were not used for the fit: of each
kind, 60 shapes are fitted, and 400 others are tested. No training is used.
"""

import csv
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from nullgpu import curves, gpus  # noqa: E402
from nullgpu.curves import Attention, Convolution, Curves, Moved, Product, Work  # noqa: E402
from nullgpu.fit import Timed, error, fitted  # noqa: E402

from lab import results  # noqa: E402

FITTED, TESTED = 60, 400
"""shapes of each kind"""
HOST = 100e-6
"""seconds; shorter rows of NeuSight are its host's, which launches one kernel after the other"""
OLD_ON_HOPPER = 0.629
"""share of the peak that the matrix instructions of an A100 attain on a Hopper GPU: https://arxiv.org/abs/2402.13499"""
NEUSIGHT = "NeuSight (https://github.com/sitar-lab/NeuSight, MIT), scripts/asplos/data"
AICONFIGURATOR = "aiconfigurator-core 0.12.0 (https://pypi.org/project/aiconfigurator-core, Apache-2.0)"


@dataclass(frozen=True)
class Device:
    """A GPU on which kernels were timed."""

    file: str
    """the name of its file in gpus/"""
    neusight: str
    """its name in NeuSight's tables"""
    bandwidth: float
    """bytes/s of the memory of NeuSight's GPU, which may be another model of it"""
    products: str = ""
    """a folder of aiconfigurator's"""
    attention: str = ""


DEVICES = [
    Device("a100", "NVIDIA A100 80GB PCIe", 1.935e12, "a100_sxm/gemm/vllm/0.14.0", "a100_sxm/attention/vllm/0.14.0"),
    # Its attention is FlashAttention-3, which PyTorch does not choose.
    Device("h100", "NVIDIA H100 80GB HBM3", 3.35e12, "h100_sxm/gemm/vllm/0.24.0"),
    Device("l4", "NVIDIA L4", 0.3e12),
    Device("t4", "Tesla T4", 0.32e12),
]
ELEMENTS = {"add": 12, "mul": 12, "div": 12, "addu": 8, "mulu": 8, "relu": 8}
"""bytes that an operation moves for each element"""


def neusight(folder: Path, device: Device) -> Iterator[Timed]:
    """Yield the kernels that NeuSight has timed on a GPU, all in fp32 without TF32."""
    data = folder / "scripts/asplos/data/dataset"
    tables = [data / f"test/{name}.csv" for name in ("linear", "bmm", "elem", "ln", "softmax")]
    tables += [data / f"train/collect/conv/p2.1.0/{device.neusight}.csv"]
    for table in filter(Path.is_file, tables):
        with table.open() as file:
            for row in csv.DictReader(file):
                if row["Device"] != device.neusight:
                    continue
                seconds = 1e-3 * float(row["Latency"])
                found = work_of_neusight(row["OPName"], row)
                if found and seconds > HOST:
                    group, work = found
                    yield Timed(group, [work], seconds)


def work_of_neusight(name: str, row: dict[str, str]) -> tuple[str, Work] | None:
    """Return the curve and the work of a row; None if there is no curve for it alone."""
    number = {key: float(row[key]) for key in ("B", "M", "N", "K", "H") if row.get(key)}
    if name in ("linear", "bmm"):
        return "product fp32", Product("fp32", number["B"], number["M"], number["N"], number["K"])
    if name == "conv":
        samples, channels, outputs, kernel, edge, stride, padding = (
            float(row[key])
            for key in ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding")
        )
        out = (edge + 2 * padding - kernel) // stride + 1
        inputs, output = 4 * samples * channels * edge**2, 4 * samples * outputs * out**2
        work = Convolution(
            "fp32", 2, 0, False, channels, outputs, 1, out**2, samples, kernel**2, inputs, output,
        )  # fmt: skip
        return "convolution 2-D fp32", work
    elements = number["B"] * number["H"]
    if name in ELEMENTS:
        return "elements", Moved("elements", ELEMENTS[name] * elements, elements)
    if name in ("ln", "softmax"):
        kind = {"ln": "layer norm", "softmax": "softmax"}[name]
        return kind, Moved(kind, 8 * elements, elements)
    return None


def aiconfigurator(folder: Path, device: Device) -> Iterator[Timed]:
    """Yield the products and the attention that aiconfigurator's tables have of a GPU, all in bf16."""
    import pyarrow.parquet

    def rows(where: str, file: str) -> list[dict[str, Any]]:
        path = folder / "aiconfigurator_core/systems/data" / where / file
        return pyarrow.parquet.read_table(path).to_pylist() if where else []

    for row in rows(device.products, "gemm_perf.parquet"):
        if row["gemm_dtype"] == "bfloat16" and min(row["m"], row["n"], row["k"]) >= 256:
            product = Product("bf16", 1, row["m"], row["n"], row["k"])
            yield Timed("product 16 bits", [product], 1e-3 * row["latency"])
    for row in rows(device.attention, "context_attention_perf.parquet"):
        if row["num_heads"] == row["num_key_value_heads"] and row["isl"] >= 256 and row["head_dim"] <= 128:
            sequences, length = row["batch_size"] * row["num_heads"], row["isl"]
            attention = Attention("bf16", False, sequences, length, length, row["head_dim"], True)
            yield Timed("attention 16 bits forward", [attention], 1e-3 * row["latency"])


def derived(
    sm: int, found: dict[str, dict[str, float]], base: dict[str, Any]
) -> Iterator[tuple[str, dict[str, float], str]]:
    """Yield curves of which there are no tables, with their parameters, and why."""
    if forward := found.get("attention 16 bits forward"):
        ratio = forward["share"] / base["attention 16 bits forward"]["share"]
        own = base["attention 16 bits backward"]
        why = "no table: its share of the peak changed as in the forward pass"
        yield "attention 16 bits backward", own | {"share": float(f"{own['share'] * ratio:.4g}")}, why
    if images := found.get("convolution 2-D fp32"):
        change = {name: images[name] for name in ("forward", "backward", "channels")}
        why = "no table: its shares of the peak are taken as those of images"
        yield "convolution 3-D fp32", base["convolution 3-D fp32"] | change, why
    if 80 <= sm < 90:
        why = (
            f"no table: PyTorch's kernel is made for an A100, and attains {OLD_ON_HOPPER:.0%} of an H200's peak at most"
        )
        for group in ("attention fp32 forward", "attention fp32 backward"):
            yield group, base[group] | {"share": float(f"{base[group]['share'] / OLD_ON_HOPPER:.4g}")}, why


def write(device: Device, found: dict[str, dict[str, float]], sources: dict[str, str]) -> None:
    """Write the parameters of the curves into the file of the GPU, in place of those there."""
    file = gpus.FOLDER / f"{device.file}.toml"
    text = re.sub(r"\n*\[clock\.measured\].*", "\n", file.read_text(), flags=re.DOTALL)
    of = {
        source: ", ".join(sorted(group for group in found if sources[group] == source)) for source in sources.values()
    }
    lines = [
        "",
        "[clock.measured]",
        'by = "others"',
        "# Fitted to kernels that others have timed:",
    ]
    lines += [f"# {source}: {groups}" for source, groups in sorted(of.items())]
    for group, parameters in sorted(found.items()):
        lines.append(f'curves."{group}" = {{ {", ".join(f"{name} = {it:g}" for name, it in parameters.items())} }}')
    file.write_text(text + "\n".join(lines) + "\n")


def main() -> None:
    """Fit, write the files of the GPUs, and store the table of errors."""
    if len(sys.argv) != 3 or not all(map(Path.is_dir, map(Path, sys.argv[1:]))):
        raise SystemExit("error: give the folders of NeuSight and aiconfigurator, as the text of this file shows")
    folders = [Path(word) for word in sys.argv[1:]]
    base = curves.the_measured()["parameters"]
    table: list[list[results.Cell]] = []
    readers: list[tuple[str, Callable[[Path, Device], Iterator[Timed]]]] = [
        (NEUSIGHT, neusight),
        (AICONFIGURATOR, aiconfigurator),
    ]
    for device in DEVICES:
        figures = gpus.read(device.file)
        plain = replace(gpus.curves_of(figures), measured={})
        found: dict[str, dict[str, float]] = {}
        sources: dict[str, str] = {}
        for (source, reader), folder in zip(readers, folders, strict=True):
            gpu = replace(plain, bandwidth=device.bandwidth) if reader is neusight else plain
            rows = list(reader(folder, device))
            for group in sorted({row.group for row in rows}):
                mine = [row for row in rows if row.group == group]
                random.Random(0).shuffle(mine)
                fit, test = mine[:FITTED], mine[FITTED : FITTED + TESTED]
                # No row is short enough to say what the floor is.
                found[group], sources[group] = fitted(gpu, group, fit, base[group], fixed=["floor"]), source
                models = Curves(gpu), Curves(replace(gpu, measured={group: found[group]}))
                before, after = ([error(model, row) for row in test] for model in models)
                cells = [f(errors) for errors in (before, after) for f in (median, max)]
                table.append([figures["name"], group, len(test), *map(exp, cells), source.partition(" (")[0]])
                print(*table[-1], found[group], sep=" | ", flush=True)
        for group, parameters, why in list(derived(figures["sm"], found, base)):
            found[group], sources[group] = parameters | {"derived": 1}, why
        write(device, found, sources)
    columns = [
        "GPU",
        "curve",
        "kernels",
        "of the H200: median",
        "of the H200: worst",
        "fitted: median",
        "fitted: worst",
    ]
    results.store(
        "clock_other_gpus",
        title="The clock's curves beside kernels that others have timed: factors by which they are wrong",
        columns=[*columns, "source"],
        rows=table,
        formats=dict.fromkeys(columns[3:], ".2f"),
        unit="a factor",
        spread=f"kernels that were not used for the fit, which used {FITTED} others",
        command="python lab/studies/clock_other_gpus.py NeuSight aiconfigurator",
    )


if __name__ == "__main__":
    main()

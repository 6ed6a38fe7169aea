"""Turn the figures of lesson 04 into parts of its README; cog calls this."""

import math
from typing import Any

from lab.render import also_on_gpu, figure, load, mean_std, not_measured, on_gpu, source, table


@also_on_gpu("precision_ladder")
def short_ladder(machine: str | None = None) -> str:
    """Render speed and error of each option of lesson 04, and the plot."""
    results = load("precision_ladder", machine)
    rows = [
        (
            row["name"],
            f"{row['samples_per_second']:,.0f} ± {row['samples_per_second_std']:,.0f}",
            "-" if row["output_error"] is None else f"{row['output_error']:.0e}",
        )
        for row in results["rows"]
        if not row["note"]
    ]
    plot = figure("precision_ladder", "Speed, memory and error of each row", machine)
    return "\n".join([table(["", "samples/s", "error of outputs"], rows), "", source(results), "", plot])


@also_on_gpu("precision_ladder")
def precision_ladder(machine: str | None = None) -> str:
    """Render what each option of lesson 04 costs and gives."""
    results = load("precision_ladder", machine)
    if not results:
        return not_measured("precision_ladder")
    rows = [
        (
            f"{row['name']}",
            f"{row['samples_per_second']:,.0f} ± {row['samples_per_second_std']:,.0f}",
            f"{row['peak_memory_bytes'] / 1e6:,.0f}",
            f"{row['tflops']:.2g}",
            f"{row['share_of_peak']:.0%}",
            "-" if row["output_error"] is None else f"{row['output_error']:.0e}",
            "-" if row["gradient_error"] is None else f"{row['gradient_error']:.0e}",
            f"{row['val_loss']:.4f}",
        )
        for row in results["rows"]
        if not row["note"]
    ]
    header = ["", "samples/s", "peak MB", "TFLOP/s", "of peak", "error of outputs", "of gradients", "val loss"]
    missing = [f"- `{row['name']}`: {row['note']}" for row in results["rows"] if row["note"]]
    peaks = ", ".join(f"{name} {tflops:.2g}" for name, tflops in results["peaks"].items())
    workload = (
        f"`{results['config']['model']}` on `{results['config']['dataset']}`, batches of {results['batch_size']}, "
        f"{results['flops_per_sample'] / 1e9:.2g} GFLOP per sample; validation loss after {results['steps']} steps. "
        f"Peak of matrix products in TFLOP/s: {peaks}."
    )
    again = results.get("repeated") or {"note": "not measured"}
    if not again["note"]:
        workload += (
            f" `{again['name']}`, measured again at the end: {again['samples_per_second']:,.0f} ± "
            f"{again['samples_per_second_std']:,.0f} samples/s."
        )
    plot = figure("precision_ladder", "Speed, memory and error of each configuration", machine)
    lines = [table(header, rows), "", workload, source(results), "", *missing, "", plot]
    return "\n".join(lines)


def full_unet() -> str:
    """Render how fast the full U-Net trains on a GPU with its data, and what its step is made of."""
    parts = [
        *(unet_throughput(results) for name in ("unet3d_throughput", "unet3d_scaling") if (results := on_gpu(name))),
        *(kernels(results) for results in [on_gpu("trace")] if results),
    ]
    return "\n\n".join(parts) or not_measured("gpu")


def unet_throughput(results: dict[str, Any]) -> str:
    """Render the throughput of the full U-Net, in samples/s and, where they were counted, in TFLOP/s."""
    kinds = ("IO", "SYNTHETIC", "FULL")
    peak = results.get("peak_tflops")  # missing in older results files
    rows = []
    for name, row in results["rows"].items():
        cells = [mean_std(row[kind]) for kind in kinds]
        cells.append(f"{row['FULL']['mean'] / row['SYNTHETIC']['mean']:.0%}")
        if peak:
            tflops = row["tflops"]["FULL"]
            cells += [f"{tflops:,.0f}", f"{tflops / row['ranks'] / peak:.0%}"]
        rows.append((name, *cells))
    header = ["full U-Net, samples/s", *kinds, "FULL of SYNTHETIC", *(["TFLOP/s of FULL", "of peak"] if peak else [])]
    lines = [table(header, rows), ""]
    if peak:
        lines.append(
            f"{results['flops_per_sample'] / 1e9:.1f} GFLOP per sample, forward and backward. The peak, {peak:,.0f} "
            f"TFLOP/s, is that of bf16 matrix products on one GPU. Boxes of {results['cells']} cells along each edge."
        )
    return "\n".join([*lines, source(results)])


def kernels(results: dict[str, Any]) -> str:
    """Render the kernels that take most of a step's time."""
    rows = [
        (f"`{row['name'][:60]}`", f"{row['calls_per_step']:.1f}", f"{row['ms_per_step']:.2f}", f"{row['share']:.1%}")
        for row in results["rows"][:10]
    ]
    busy = (
        f"A traced step takes {results['step_ms']:.1f} ms; kernels run in {results['busy_ms_per_step']:.1f} ms of it."
    )
    return "\n".join([table(["kernel", "calls per step", "ms per step", "share"], rows), "", busy, source(results)])


@also_on_gpu("underflow")
def underflow(machine: str | None = None) -> str:
    """Render what becomes of a model's gradients in 16 bits."""
    results = load("underflow", machine)
    if not results:
        return not_measured("underflow")
    rows = [
        (
            row["format"],
            f"2^{math.log2(row['scale']):.0f}",
            *(f"{row[name]:.1%}" for name in ("zero", "coarse", "overflow")),
        )
        for row in results["rows"]
    ]
    losses = "; ".join(f"{name}: **{loss:.4f}**" for name, loss in results["val_losses"].items())
    plot = figure("underflow", "Histogram of the gradients' powers of two", machine)
    header = ["format", "loss times", "become 0", "lose digits", "overflow"]
    trained = f"Validation loss after {results['steps']} steps, by format and scale: {losses}."
    return "\n".join([table(header, rows), "", trained, source(results), "", plot])


@also_on_gpu("tensor_cores")
def tensor_cores(machine: str | None = None) -> str:
    """Render how the rate of matrix products depends on their sizes."""
    results = load("tensor_cores", machine)
    if not results:
        return not_measured("tensor_cores")
    conclusions = [f"- {text}" for text in results["conclusions"].values()]
    plot = figure("tensor_cores", "Rate of matrix products by size", machine)
    return "\n".join([*conclusions, "", plot, "", source(results)])


def unet3d() -> str:
    """Render the losses of the tiny U-Net against that of a predictor without a network."""
    results = load("unet3d")
    if not results:
        return not_measured("unet3d")
    first = results["rows"][0]["val_loss"]
    rows = [
        (
            f"`{row['precision']}`",
            f"{row['val_loss']:.4f}",
            f"{row['val_loss'] / first - 1:+.1%}",
            f"{results['trivial_loss'] / row['val_loss']:.1f}x",
            f"{row['seconds']:.0f}",
        )
        for row in results["rows"]
    ]
    header = ["`--precision`", "val loss", "against fp32", "below the copy", "training seconds"]
    copying = f"A predictor that copies its input and knows no temperature has a loss of {results['trivial_loss']:.4f}."
    return "\n".join([table(header, rows), "", copying, source(results)])

"""Turn the figures of lesson 04 into parts of its README; cog calls this."""

import math
from typing import Any

from render import also_on_gpu, load, not_measured, on_gpu, picture, source, table


@also_on_gpu("precision_ladder")
def short_ladder(machine: str | None = None) -> str:
    """Render speed and error of each option of lesson 04, and the plot."""
    record = load("precision_ladder", machine)
    rows = [
        (
            row["name"],
            f"{row['samples_per_second']:,.0f} ± {row['samples_per_second_std']:,.0f}",
            "-" if row["output_error"] is None else f"{row['output_error']:.0e}",
        )
        for row in record["rows"]
        if not row["note"]
    ]
    plot = picture("precision_ladder", "Speed, memory and error of each row", machine)
    return "\n".join([table(["", "samples/s", "error of outputs"], rows), "", source(record), "", plot])


@also_on_gpu("precision_ladder")
def precision_ladder(machine: str | None = None) -> str:
    """Render what each option of lesson 04 costs and gives."""
    record = load("precision_ladder", machine)
    if not record:
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
        for row in record["rows"]
        if not row["note"]
    ]
    header = ["", "samples/s", "peak MB", "TFLOP/s", "of peak", "error of outputs", "of gradients", "val loss"]
    missing = [f"- `{row['name']}`: {row['note']}" for row in record["rows"] if row["note"]]
    peaks = ", ".join(f"{name} {tflops:.2g}" for name, tflops in record["peaks"].items())
    workload = (
        f"`{record['config']['model']}` on `{record['config']['dataset']}`, batches of {record['batch_size']}, "
        f"{record['flops_per_sample'] / 1e9:.2g} GFLOP per sample; validation loss after {record['steps']} steps. "
        f"Peak of matrix products in TFLOP/s: {peaks}."
    )
    again = record.get("repeated") or {"note": "not measured"}
    if not again["note"]:
        workload += (
            f" `{again['name']}`, measured again at the end: {again['samples_per_second']:,.0f} ± "
            f"{again['samples_per_second_std']:,.0f} samples/s."
        )
    plot = picture("precision_ladder", "Speed, memory and error of each configuration", machine)
    lines = [table(header, rows), "", workload, source(record), "", *missing, "", plot]
    return "\n".join(lines)


def full_unet() -> str:
    """Render how fast the full U-Net trains on a GPU with its data, and what its step is made of."""
    parts = [
        *(unet_throughput(record) for name in ("unet3d_throughput", "unet3d_scaling") if (record := on_gpu(name))),
        *(kernels(record) for record in [on_gpu("trace")] if record),
    ]
    return "\n\n".join(parts) or not_measured("gpu")


def unet_throughput(record: dict[str, Any]) -> str:
    """Render the throughput of the full U-Net, in samples/s and, where they were counted, in TFLOP/s."""
    kinds = ("IO", "SYNTHETIC", "FULL")
    peak = record.get("peak_tflops")  # older records do not have it
    rows = []
    for name, row in record["rows"].items():
        cells = [f"{row[kind]['mean']:,.0f} ± {row[kind]['std']:,.0f}" for kind in kinds]
        cells.append(f"{row['FULL']['mean'] / row['SYNTHETIC']['mean']:.0%}")
        if peak:
            tflops = row["tflops"]["FULL"]
            cells += [f"{tflops:,.0f}", f"{tflops / row['ranks'] / peak:.0%}"]
        rows.append((name, *cells))
    header = ["full U-Net, samples/s", *kinds, "FULL of SYNTHETIC", *(["TFLOP/s of FULL", "of peak"] if peak else [])]
    lines = [table(header, rows), ""]
    if peak:
        lines.append(
            f"{record['flops_per_sample'] / 1e9:.1f} GFLOP per sample, forward and backward. The peak, {peak:,.0f} "
            f"TFLOP/s, is that of bf16 matrix products on one GPU. Boxes of {record['cells']} cells along each edge."
        )
    return "\n".join([*lines, source(record)])


def kernels(record: dict[str, Any]) -> str:
    """Render the kernels that take most of a step's time."""
    rows = [
        (f"`{row['name'][:60]}`", f"{row['calls_per_step']:.1f}", f"{row['ms_per_step']:.2f}", f"{row['share']:.1%}")
        for row in record["rows"][:10]
    ]
    busy = f"A traced step takes {record['step_ms']:.1f} ms; kernels run in {record['busy_ms_per_step']:.1f} ms of it."
    return "\n".join([table(["kernel", "calls per step", "ms per step", "share"], rows), "", busy, source(record)])


@also_on_gpu("underflow")
def underflow(machine: str | None = None) -> str:
    """Render what becomes of a model's gradients in 16 bits."""
    record = load("underflow", machine)
    if not record:
        return not_measured("underflow")
    rows = [
        (
            row["format"],
            f"2^{math.log2(row['scale']):.0f}",
            *(f"{row[name]:.1%}" for name in ("zero", "coarse", "overflow")),
        )
        for row in record["rows"]
    ]
    losses = "; ".join(f"{name}: **{loss:.4f}**" for name, loss in record["val_losses"].items())
    plot = picture("underflow", "Histogram of the gradients' powers of two", machine)
    header = ["format", "loss times", "become 0", "lose digits", "overflow"]
    trained = f"Validation loss after {record['steps']} steps, by format and scale: {losses}."
    return "\n".join([table(header, rows), "", trained, source(record), "", plot])


@also_on_gpu("tensor_cores")
def tensor_cores(machine: str | None = None) -> str:
    """Render how the rate of matrix products depends on their sizes."""
    record = load("tensor_cores", machine)
    if not record:
        return not_measured("tensor_cores")
    conclusions = [f"- {text}" for text in record["conclusions"].values()]
    plot = picture("tensor_cores", "Rate of matrix products by size", machine)
    return "\n".join([*conclusions, "", plot, "", source(record)])


def unet3d() -> str:
    """Render the losses of the tiny U-Net against that of a predictor without a network."""
    record = load("unet3d")
    if not record:
        return not_measured("unet3d")
    first = record["rows"][0]["val_loss"]
    rows = [
        (
            f"`{row['precision']}`",
            f"{row['val_loss']:.4f}",
            f"{row['val_loss'] / first - 1:+.1%}",
            f"{record['trivial_loss'] / row['val_loss']:.1f}x",
            f"{row['seconds']:.0f}",
        )
        for row in record["rows"]
    ]
    header = ["`--precision`", "val loss", "against fp32", "below the copy", "training seconds"]
    copying = f"A predictor that copies its input and knows no temperature has a loss of {record['trivial_loss']:.4f}."
    return "\n".join([table(header, rows), "", copying, source(record)])

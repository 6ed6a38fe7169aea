"""Turn the figures of lesson 04 into parts of its README; cog calls this."""

import math

from render import also_on_gpu, load, load_whole, not_measured, picture, source, table


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
    return "\n".join([*lines, *(["", full_unet(machine)] if machine else [])])


def full_unet(machine: str) -> str:
    """Render how fast the full U-Net trains with its data, and what its step is made of, where it was measured."""
    lines = []
    if record := load_whole("unet3d_throughput", machine):
        kinds = ("IO", "SYNTHETIC", "FULL")
        rows = [
            (
                name,
                *(f"{row[kind]['mean']:,.0f} ± {row[kind]['std']:,.0f}" for kind in kinds),
                f"{row['FULL']['mean'] / row['SYNTHETIC']['mean']:.0%}",
            )
            for name, row in record["rows"].items()
        ]
        lines += [table(["full U-Net, samples/s", *kinds, "FULL of SYNTHETIC"], rows), "", source(record), ""]
    if record := load_whole("trace", machine):
        rows = [
            (
                f"`{row['name'][:60]}`",
                f"{row['calls_per_step']:.1f}",
                f"{row['ms_per_step']:.2f}",
                f"{row['share']:.1%}",
            )
            for row in record["rows"][:10]
        ]
        busy = (
            f"A traced step takes {record['step_ms']:.1f} ms; kernels run in {record['busy_ms_per_step']:.1f} ms of it."
        )
        lines += [table(["kernel", "calls per step", "ms per step", "share"], rows), "", busy, source(record)]
    return "\n".join(lines)


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

"""Turn the figures of lesson 04 into parts of its README; cog calls this."""

import math

from render import load, not_measured, picture, source, table


def precision_ladder() -> str:
    """Render what each option of lesson 04 costs and gives."""
    record = load("precision_ladder")
    if not record:
        return not_measured("precision_ladder")
    rows = [
        (
            f"{row['name']}",
            f"{row['samples_per_second']:,.0f} ± {row['samples_per_second_std']:,.0f}",
            f"{row['peak_memory_bytes'] / 1e6:,.0f}",
            f"{row['tflops']:.2g}",
            f"{row['share_of_peak']:.0%}",
            f"{row['output_error']:.0e}",
            f"{row['gradient_error']:.0e}",
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
    plot = picture("precision_ladder", "Speed, memory and error of each rung")
    return "\n".join([table(header, rows), "", workload, source(record), "", *missing, "", plot])


def underflow() -> str:
    """Render what becomes of a model's gradients in 16 bits."""
    record = load("underflow")
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
    plot = picture("underflow", "Histogram of the gradients' powers of two")
    header = ["format", "loss times", "become 0", "lose digits", "overflow"]
    trained = f"Validation loss after {record['steps']} steps, by format and scale: {losses}."
    return "\n".join([table(header, rows), "", trained, source(record), "", plot])


def tensor_cores() -> str:
    """Render how the rate of matrix products depends on their sizes."""
    record = load("tensor_cores")
    if not record:
        return not_measured("tensor_cores")
    conclusions = [f"- {text}" for text in record["conclusions"].values()]
    plot = picture("tensor_cores", "Rate of matrix products by size")
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

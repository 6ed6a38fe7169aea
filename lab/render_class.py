"""Turn the measured figures into the answers that an instructor expects of a class; cog calls this."""

import statistics

from lab import render_scaling
from lab.render import load, machine, table


def expected() -> str:
    """Render what each exercise with a figure for an answer gives on the machine of the pages."""
    loaders, epoch, fast = load("loaders")["loaders"], load("baseline")["epoch"], load("success_rate")
    means = {name: [found[kind]["mean"] for kind in ("IO", "SYNTHETIC", "FULL")] for name, found in loaders.items()}
    errors = {row["name"]: row["output_error"] for row in load("precision_ladder")["rows"]}
    rates = {row["name"]: statistics.median(run["samples_per_second"] for run in row["runs"]) for row in fast["rows"]}
    gradients = load("scaling")["gradient_bytes"]
    zero = {(row["format"], row["scale"]): row["zero"] for row in load("underflow")["rows"]}
    rows = [
        ("01, first run", f"{epoch['val_accuracy']:.1%} after an epoch of {epoch['seconds']:.0f} s"),
        (
            "01, 3",
            "FULL over the smaller of the others: "
            + ", ".join(f"`{n}` {m[2] / min(m[:2]):.0%}" for n, m in means.items()),
        ),
        ("03, 1 and 4", f"{gradients / 1e6:.2f} MB of gradients, which are {gradients // 4:,} parameters of 4 bytes"),
        ("03, scaling", render_scaling.scaling_diagnosis("strong")),
        ("04, 1", f"error of outputs: fp16 {errors['fp16']:.0e}, bf16 {errors['bf16']:.0e}"),
        ("04, 3", f"`--precision fp32` takes {rates['fast']:,.0f} samples/s to {rates['fp32']:,.0f}"),
        ("04, 5", f"of the smaller cubes' gradients, fp16 makes {zero['fp16', 1.0]:.0%} zero without a scaler"),
    ]
    sources = f"*Measured on {machine(load('loaders'))}; scaling on {machine(load('scaling'))}.*"
    return "\n".join([table(["exercise", "expect"], rows), "", sources])

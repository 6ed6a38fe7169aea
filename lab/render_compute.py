"""Turn the figures of lesson 04 into parts of its pages; cog calls this."""

import json
import math
import re
from typing import Any

from lab.example_output import COMMANDS_04, FOLDER
from lab.render import RESULTS, also_on_gpu, figure, gpu_machine, load, mean_std, not_measured, on_gpu, source, table

SPEEDS = (r"  [\d,]+ samples/s  load .* ms$", r"  [\d.]+ s  [\d,]+ samples/s$")
"""of a line of training and of an epoch: left out, because they differ from run to run"""


PREDICTION = RESULTS / "unet_prediction.json"
"""what see_prediction.py has found, with its plot beside it"""


def output(name: str, speeds: bool = False) -> str:
    """Return what a command of the pages printed when it was run for them, by default without the speeds."""
    command, _, text = (FOLDER / f"04_mixed_precision_{name}.txt").read_text().partition("\n")
    if command != f"$ {COMMANDS_04[name]}":
        raise ValueError(f"python lab/example_output.py {name}: the command has changed")
    for pattern in () if speeds else SPEEDS:
        text = re.sub(pattern, "  ...", text, flags=re.MULTILINE)
    return f"```text\n{text}```"


@also_on_gpu("precision_ladder")
def short_ladder(machine: str | None = None) -> str:
    """Render what each option of lesson 04 gains compared with the row that it is added to, and the error."""
    results = load("precision_ladder", machine)
    measured = [row for row in results["rows"] if not row["note"]]
    before, rows = measured[0], []
    for row in measured:
        # A number format is compared with float32; an option, whose name begins with "+", with the row above.
        before = before if row["name"].startswith("+") else measured[0]
        rows.append(
            (
                row["name"],
                f"{row['samples_per_second']:,.0f} ± {row['samples_per_second_std']:,.0f}",
                "" if row is measured[0] else change_of_speed(before, row),
                "-" if row["output_error"] is None else f"{row['output_error']:.0e}",
            )
        )
        before = row
    header = ["", "samples/s", "compared with", "error of outputs"]
    return "\n".join([table(header, rows), "", source(results)])


def change_of_speed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Say by which factor the speed of two rows of the comparison differs, or that the difference is noise."""
    speeds, spreads = (
        [row[key] for row in (before, after)] for key in ("samples_per_second", "samples_per_second_std")
    )
    if abs(speeds[1] - speeds[0]) <= sum(spreads):
        return f"{before['name']}: noise"
    ratio = speeds[1] / speeds[0]
    return f"{before['name']}: {ratio:.1f}x" if ratio >= 0.95 else f"{before['name']}: {ratio:.2f}x"


def why_bf16_gains() -> str:
    """Explain the speed and the error of bf16 in the comparison, by the speed of products and by significant bits."""
    results = load("precision_ladder")
    peaks = results["peaks"]
    errors = {row["name"]: row["output_error"] for row in results["rows"]}
    return (
        "- **bf16 gains**, because this CPU has instructions for it. Its fastest matrix product is "
        f"{peaks['bf16'] / peaks['fp32']:.1f} times as fast in bf16 as in fp32. The whole step gains less, because "
        "everything that is not a product is as fast as before.\n"
        f"- **The errors** are relative to float64. That of bf16 is {errors['bf16'] / errors['fp16']:.0f} times that "
        "of fp16; eight times would follow from the significant bits alone. The options below bf16 change the order of "
        "additions, and `compile` leaves out some roundings. Both effects are far smaller than the error of bf16 "
        "itself, so these rows show the same error."
    )


def errors() -> str:
    """Explain the errors in the comparison: those of outputs follow from the formats, those of gradients do not."""
    rows = {row["name"]: row for row in load("precision_ladder")["rows"]}

    def ratio(larger: str, smaller: str, what: str) -> str:
        return f"that of {larger} is {rows[larger][what] / rows[smaller][what]:.0f} times that of {smaller}"

    return (
        "- **Errors** are relative to float64, for outputs and gradients of the same batch. Those of the outputs in 16 "
        f"bits follow from the significant bits: {ratio('bf16', 'fp16', 'output_error')}, where the bits alone would "
        f"make it 8. Those of the gradients do not: {ratio('bf16', 'fp16', 'gradient_error')}, and "
        f"{ratio('fp16', 'fp32', 'gradient_error')}, where the bits alone would make it 8 and 8,192. The loss is the "
        "likely reason: the derivative of an absolute error is a sign, and rounding changes the sign where output and "
        "target nearly agree. So even in fp32, gradients are far less exact than outputs."
    )


def peak_megabytes(name: str) -> str:
    """Return the peak of the tensors' memory of one row of the comparison."""
    rows = {row["name"]: row["peak_memory_bytes"] for row in load("precision_ladder")["rows"]}
    return f"{rows[name] / 1e6:.1f} MB"


def memory_saved() -> str:
    """Say how much lower the peak of the tensors' memory is in bf16 than in float32."""
    rows = {row["name"]: row["peak_memory_bytes"] for row in load("precision_ladder")["rows"]}
    share = 1 - rows["bf16"] / rows["fp32"]
    return f"{peak_megabytes('bf16')}. That is {share:.0%} less than in fp32, and not half."


def underflow_shares() -> str:
    """Say how many gradients fp16 makes zero, without a scaler and with a loss like that of the full U-Net."""
    results = load("underflow")
    shares = {row["scale"]: row for row in results["rows"] if row["format"] == "fp16"}
    losses = results["val_losses"]
    return "\n".join(
        [
            f"- **Without a scaler**, {shares[1.0]['zero']:.0%} of the gradients become zero, and "
            f"{shares[1.0]['coarse']:.0%} lose digits. After {results['steps']} steps the validation loss is "
            f"{losses['fp16, not scaled']:.4f}; in fp32 it is {losses['fp32']:.4f}, and in fp16 with the scaler "
            f"{losses['fp16, scaled']:.4f}. These are single runs, early in a training, so the differences between the "
            "three may be chance. (Trained to the end, "
            "[all formats agree](experiments/unet3d.md#the-u-net-in-each-format).)",
            f"- **With the loss times 2<sup>-8</sup>**, so that the gradients are as small as those of the full U-Net, "
            f"{shares[2.0**-8]['zero']:.1%} are too small for fp16, each counted by itself. (In the training all "
            "become zero, because all follow from those of the outputs.) The validation loss stays at "
            f"{losses['fp16, loss times 2^-8']:.4f}.",
            "",
            source(results),
        ]
    )


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
            f"2<sup>{math.log2(row['scale']):.0f}</sup>",
            *(f"{row[name]:.1%}" for name in ("zero", "coarse", "overflow")),
        )
        for row in results["rows"]
    ]
    named = {name.replace("2^-8", "2<sup>-8</sup>"): loss for name, loss in results["val_losses"].items()}
    losses = "; ".join(f"{name}: **{loss:.4f}**" for name, loss in named.items())
    plot = figure("underflow", "Histogram of the gradients' powers of two", machine)
    header = ["format", "loss times", "become 0", "lose digits", "overflow"]
    trained = f"Validation loss after {results['steps']} steps, by format and scale: {losses}."
    return "\n".join([table(header, rows), "", trained, source(results), "", plot])


def tensor_cores() -> str:
    """Render how the speed of matrix products depends on their sizes, on a GPU: a CPU has no tensor cores."""
    results = on_gpu("tensor_cores")
    if not results:
        return not_measured("gpu")
    conclusions = [f"- {text}" for text in results["conclusions"].values()]
    plot = figure("tensor_cores", "TFLOP/s of matrix products by size", gpu_machine("tensor_cores"))
    return "\n".join([*conclusions, "", plot, "", source(results)])


def prediction() -> str:
    """Render what the trained tiny U-Net predicts, and its error beside that of the identity baseline."""
    if not PREDICTION.exists():
        return "*Not measured yet: `python experiments/see_prediction.py`.*"
    results = json.loads(PREDICTION.read_text())
    baseline, predicted = results["errors"]["identity baseline"], results["errors"]["prediction"]
    lower = [f"{name} {1 - predicted[name] / baseline[name]:.0%}" for name in ("density", "velocity", "temperature")]
    what = (
        "A slice. Above: density of the dark matter, of the gas, and of the gas as it is predicted. Below: velocity of "
        "the dark matter, temperature of the gas, and the temperature as it is predicted"
    )
    said = (
        f"A slice through a cube of {results['cells']}³ cells, after {results['run']['epochs']} epochs. The mean "
        f"absolute error is {predicted['all']:.4f}; that of the identity baseline, which takes the dark matter for the "
        f"gas, is {baseline['all']:.4f}. It is lower by: {', '.join(lower)}."
    )
    return "\n".join([f"![{what}](../results/{PREDICTION.stem}.png)", "", said, source(results)])


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
            f"{row['seconds']:.0f}",
        )
        for row in results["rows"]
    ]
    header = ["`--precision`", "validation loss", "against fp32", "training seconds"]
    baseline = (
        f"Compare them with {results['trivial_loss']:.4f}, the loss of the identity baseline: it predicts the density "
        "and velocity of the gas to be those of the dark matter, and no temperature."
    )
    return "\n".join([table(header, rows), "", baseline, source(results)])

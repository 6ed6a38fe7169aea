"""Turn the figures of small_studies.py into parts of the side pages; cog calls this."""

from statistics import median

from lab.render import RESULTS, figure, load, mean_std, not_measured, source, table


def throughputs(experiment: str, key: str, header: str, kinds: tuple[str, ...]) -> str:
    """Render the samples/s of an experiment, a row for each value of ``key``."""
    results = load(experiment)
    if not results:
        return not_measured(experiment)
    rows = [(str(row[key]), *(mean_std(row[kind]) for kind in kinds)) for row in results["rows"]]
    return "\n".join([table([header, *kinds], rows), "", THREE_TRIALS, source(results)])


THREE_TRIALS = "In samples/s, mean ± standard deviation of three trials."
"""what `--benchmark true` measures"""


def worker_counts() -> str:
    """Render the throughput of lesson 01 by the number of worker processes."""
    return throughputs("worker_counts", "num_workers", "`--num_workers`", ("IO", "SYNTHETIC", "FULL"))


def models() -> str:
    """Render the speed of loading and of training by model, from small to large."""
    return throughputs("models", "model", "`--model`", ("IO", "SYNTHETIC", "FULL"))


def cifar_loading() -> str:
    """Render how batch size, workers and prefetching change the speed of loading CIFAR-10."""
    results = load("cifar_loading")
    if not results:
        return not_measured("cifar_loading")
    kinds = ("IO", "SYNTHETIC", "FULL")
    rows = [
        (
            str(row["batch"]),
            str(row["workers"]),
            str(row["prefetch"]) if row["workers"] else "",
            *map(mean_std, map(row.get, kinds)),
        )
        for row in results["rows"]
    ]
    return "\n".join([table(["batch", "workers", "prefetch", *kinds], rows), "", THREE_TRIALS, source(results)])


def ddp_options() -> str:
    """Render how DDP's options change the all-reduces and the speed."""
    results = load("ddp_options")
    if not results:
        return not_measured("ddp_options")
    rows = [
        (
            row["option"].replace("as it comes", "default settings"),  # what older results files call it
            str(row["all_reduces_per_step"]),
            f"{row['all_reduce_bytes_per_step'] / 1e6:,.1f}",
            mean_std(row["SYNTHETIC"]),
            mean_std(row["COMPUTE"]),
        )
        for row in results["rows"]
    ]
    header = ["", "all-reduces per step", "MB", "SYNTHETIC", "COMPUTE"]
    unit = "SYNTHETIC and COMPUTE in samples/s, mean ± standard deviation of three trials."
    return "\n".join([table(header, rows), "", unit, source(results)])


def batches() -> str:
    """Render the final losses of batches of 64 to 2048, and with how many seeds they are as low as that of 64."""
    results = load("batches")
    if not results:
        return not_measured("batches")
    rows = []
    for name, curves in results["curves"].items():
        first = curves[0]
        finals = [curve["val_loss"][-1] for curve in curves]
        reached = [curve["steps"][curve["epoch_at_target"] - 1] for curve in curves if curve["epoch_at_target"]]
        rows.append(
            (
                f"`{name}`",
                f"{first['peak_lr']:.2g}",
                str(first["epochs"]),
                str(first["steps"][-1]),
                f"{median(finals):.3f}",
                f"{min(finals):.3f} to {max(finals):.3f}",
                f"{len(reached)} of {len(curves)}",
                f"{median(reached):.0f}" if reached else "",
            )
        )
    header = ["overlay", "peak lr", "epochs", "steps", "median final loss", "range", "as low as 64", "after steps"]
    return "\n".join([table(header, rows), "", source(results)])


def line_fit() -> str:
    """Render the plot of the fitted line, and its equation."""
    results = load("line_fit")
    found, best = (
        f"y = {slope:.3f} x + {intercept:.3f}" for slope, intercept in (results["found"], results["least_squares"])
    )
    words = f"After {results['steps']} steps it is {found}; least squares, which solves it at once, gives {best}."
    what = (
        "Fifty points that lie near a rising line, and four lines. After 0 steps the line is flat at zero, after 5 it "
        "is too low and too flat, after 20 it is almost among the points, and after 200 it lies in their middle"
    )
    return "\n".join([figure("line_fit", what), "", words])


USUAL_BANDWIDTHS = (  # GB/s of the specifications, one way, and the row of bandwidth.py that measures it
    ("hard disk, in sequence", 0.2, None),
    ("SATA disk without moving parts (SSD)", 0.55, None),
    ("Ethernet, 10 Gb/s", 1.25, None),
    ("NVMe disk", 7, "disk, sequential read"),
    ("PCIe 3.0, 16 lanes", 16, None),
    ("InfiniBand, 200 Gb/s (HDR)", 25, None),
    ("PCIe 4.0, 16 lanes", 32, None),
    ("PCIe 5.0, 16 lanes", 63, "host to device, pinned"),
    ("NVLink of an A100", 300, None),
    ("host memory, 8 channels of DDR5-4800", 307, "memory copy"),
    ("NVLink of an H100", 450, None),
    ("device memory of an A100 (HBM2, 40 GB)", 1555, None),
    ("device memory of an H200 (HBM3e)", 4800, "device to device"),
)


def bandwidths() -> str:
    """Render the usual bandwidths beside those measured on each machine with a results file."""
    files = sorted(RESULTS.glob("*.json"))
    all_results = [results for file in files if (results := load("bandwidth", file.stem))]
    rows = []
    for name, usual, path in USUAL_BANDWIDTHS:
        cells = []
        for results in all_results:
            found = [row.get("gb_per_second") for row in results["rows"] if path and row["path"].startswith(path)]
            fastest = max((speed for speed in found if speed), default=None)
            cells.append(f"{fastest:,.1f}" if fastest else "not measured" if path else "")
        hours = 1e6 / usual / 3600
        rows.append((name, f"{usual:,g}", f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}", *cells))
    machines = [results["hardware"].get("device_name") or results["hardware"]["cpu"] for results in all_results]
    lines = [table(["path", "usual GB/s", "hours per PB", *(f"measured: {name}" for name in machines)], rows), ""]
    how = (
        "Each path was measured once. The disk of that machine is a virtual one, and which kind of disk it is on is "
        "not known: it stands in the row that is closest. Its memory was copied by two CPUs, which cannot use all "
        "channels."
    )
    return "\n".join([*lines, how, *(source(results) for results in all_results)])


def exercise(*names: str) -> str:
    """Render the results of the exercises' runs, for a reader to compare with."""
    results = load("exercises")
    if not results:
        return not_measured("exercises")
    runs = [(name, results["runs"][name]) for name in names]
    ends = [f"{name}: {run['val_loss']:.3f} and {run['val_accuracy']:.1%}" for name, run in runs]
    return (
        f"Validation loss and accuracy on an {results['hardware']['cpu']} (other CPUs differ), one run each: "
        f"{'; '.join(ends)}."
    )


def predicted_full() -> str:
    """Render FULL of each loader as a share of what it would be without overlap, and with full overlap."""
    rows = []
    for name, found in load("loaders")["loaders"].items():
        io, synthetic, full = (found[kind]["mean"] for kind in ("IO", "SYNTHETIC", "FULL"))
        predicted = 1 / (1 / io + 1 / synthetic), min(io, synthetic)
        shares = (cell for value in predicted for cell in (f"{value:,.0f}", f"{full / value:.0%}"))
        rows.append((f"`{name}`", f"{full:,.0f}", *shares))
    header = ["`--loader`", "FULL", "no overlap", "FULL is", "full overlap", "FULL is"]
    how = "From the means of the table above, in samples/s; *FULL is* says what share of each prediction was measured."
    return "\n".join([table(header, rows), "", how])


def higher_rate() -> str:
    """Render the final losses of batch 64 with higher learning rates."""
    results = load("higher_rate")
    if not results:
        return not_measured("higher_rate")
    ends = [f"with {row['lr']:g} at {row['val_loss'][-1]:.3f}" for row in results["rows"]]
    return f"Batch 64 ends {', '.join(ends)} (validation loss; one seed)."

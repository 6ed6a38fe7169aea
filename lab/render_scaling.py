"""Turn the figures of comparison, scaling study and all-reduce into parts of the READMEs; cog calls this."""

from typing import Any

import prediction
from allreduce import TRIALS
from alpha_beta import Network
from lab import render
from lab.render import MACHINE, WITHOUT_BF16, also_on_gpu, figure, load, mean_std, not_measured, source, table
from scaling_study import diagnosis, full_over_compute
from workshop.models import build_model


@also_on_gpu("compare")
def compare(machine: str | None = None) -> str:
    """Render lesson 02's comparison of one device, DataParallel and DDP."""
    results = load("compare", machine)
    if not results:
        return not_measured("compare")
    rows = []
    for row in results["rows"]:
        cells = [row.get("reason", ""), "", "", ""]
        if "reason" not in row:
            cells = [c for k in ("SYNTHETIC", "FULL") for c in (mean_std(row[k]), f"{row[k]['ratio']:.2f}x")]
        rows.append((row["name"], *cells))
    trials = sorted({len(row["FULL"]["trials"]) for row in results["rows"] if "reason" not in row})
    unit = (
        f"In samples/s, mean ± standard deviation of {' or '.join(map(str, trials))} trials; "
        f"{results['global_batch_size']} samples per step over all devices. *Ratio* is that to the mean of the first "
        "row."
    )
    return "\n".join([table(["", "SYNTHETIC", "ratio", "FULL", "ratio"], rows), "", unit, source(results)])


def two_ranks_or_two_threads() -> str:
    """Say whether two ranks of one thread differ from one process of two threads by more than the spread."""
    rows = {row["name"]: row for row in load("compare")["rows"] if "reason" not in row}
    _, two = (row for name, row in rows.items() if name.startswith("one process"))
    ranks = next(row for name, row in rows.items() if name.startswith("DDP"))
    said = [f"Two threads are {two['SYNTHETIC']['ratio']:.1f} times as fast as one, not two times."]
    for kind in ("SYNTHETIC", "FULL"):
        difference = ranks[kind]["mean"] - two[kind]["mean"]
        larger = max(ranks[kind]["std"], two[kind]["std"])
        if abs(difference) <= larger:
            said.append(f"In {kind}, two ranks and two threads differ by less than the spread, so it may be noise.")
        else:
            faster = "faster" if difference > 0 else "slower"
            said.append(f"In {kind}, two ranks are {faster} than two threads, by more than the spread.")
    full, synthetic = ranks["FULL"], ranks["SYNTHETIC"]
    if synthetic["mean"] < full["mean"] <= synthetic["mean"] + max(full["std"], synthetic["std"]):
        said.append(
            "(FULL of the two ranks is above their SYNTHETIC, although loading is added in it. This difference, too, "
            "is smaller than the spread.)"
        )
    return "\n".join(said)


def scaling() -> str:
    """Render FULL, COMPUTE and their ratio on both CPU machines and on GPUs, with the spread of the ratio."""
    machines = (MACHINE, WITHOUT_BF16, render.gpu_machine("scaling"))
    studies = [study for machine in machines if machine and (study := load("scaling", machine))]
    if not studies:
        return not_measured("scaling")
    rows = []
    for study in studies:
        for row in study["rows"]:
            if row["ranks"] == 1 and row["scaling"] == "strong":
                continue  # the same trials as those of weak scaling
            ratio = full_over_compute(row)
            rows.append(
                (
                    short_name(study),
                    row["scaling"] if row["ranks"] > 1 else "one rank",
                    str(row["ranks"]),
                    str(row["batch_size"]),
                    *(mean_std(row[kind]) for kind in ("FULL", "COMPUTE")),
                    f"{ratio.median:.0%}",
                    f"{ratio.lowest:.0%} to {ratio.highest:.0%}",
                )
            )
    pairs = sorted({full_over_compute(row).pairs for study in studies for row in study["rows"]})
    header = ["machine", "scaling", "ranks", "batch per rank", "FULL", "COMPUTE", "FULL / COMPUTE", "range"]
    unit = (
        f"FULL and COMPUTE in samples/s, mean ± standard deviation of {' or '.join(map(str, pairs))} trials. The ratio "
        f"is the median over pairs of trials; the range is that of the pairs."
    )
    named = [study | {"hardware": study["hardware"] | {"cpu_instructions": short_name(study)}} for study in studies]
    return "\n".join([table(header, rows), "", unit, *map(source, named)])


def short_name(results: dict[str, Any]) -> str:
    """Return a name of the machine of a results file that is short enough for a table."""
    hardware = results["hardware"]
    # Older results files do not name the instructions: they are of the machine whose name has them.
    return hardware.get("device_name") or hardware.get("cpu_instructions") or MACHINE.split("_")[2].upper()


def scaling_diagnosis(kind: str, machine: str | None = None) -> str:
    """Render in words what communication costs in weak or strong scaling."""
    return diagnosis([row for row in load("scaling", machine)["rows"] if row["scaling"] == kind])


def one_rank_range() -> str:
    """Say between which values FULL over COMPUTE lies with one rank, where nothing is sent: this is the noise."""
    ratio = full_over_compute(next(row for row in load("scaling")["rows"] if row["ranks"] == 1))
    return (
        f"- One rank, which has nobody to send to: {ratio.median:.0%} (the median of {ratio.pairs} pairs of trials, "
        f"which range from {ratio.lowest:.0%} to {ratio.highest:.0%}). This range shows how large the noise is."
    )


@also_on_gpu("allreduce")
def allreduce(machine: str | None = None) -> str:
    """Render the fitted latency and bandwidth of the all-reduce, and its plot."""
    results = load("allreduce", machine)
    if not results:
        return not_measured("allreduce")
    rows = [
        (
            f"{row['bytes'] / 1024:,.0f}",
            f"{1e3 * row['seconds']:.2f}",
            f"{1e3 * row['spread']:.2f}",
            f"{row['bus_gb_per_second']:.3f}",
        )
        for row in results["rows"]
    ]
    beta = f"{1e-9 / results['beta']:.2f} GB/s" if results["beta"] else "no limit in sight"
    fitted = (
        f"{results['world_size']} ranks over {results['backend']}; the median of {TRIALS} trials, and the difference "
        f"between the slowest and the fastest one. Fitted: {1e6 * results['alpha']:,.0f} µs per message (alpha) and "
        f"{beta} (1 / beta)."
    )
    what = (
        "Left: time of an all-reduce by message size, measured and fitted: nearly equal up to 256 KiB, then it grows "
        "with the size. Right: bus bandwidth, which is near zero for small messages, rises, and levels off at 1 / beta"
    )
    plot = figure("allreduce", what, machine)
    header = ["KiB", "ms", "slowest - fastest, ms", "bus GB/s"]
    return "\n".join([table(header, rows), "", fitted, source(results), "", plot])


def allreduce_in_words() -> str:
    """Say how long a small, a medium and the largest message took."""
    results = load("allreduce")
    by_size = {row["bytes"] // 1024: row for row in results["rows"]}
    small, medium, large = (by_size[kib] for kib in (4, 64, 64 * 1024))

    def time_of(row: dict[str, Any]) -> str:
        return f"{1e3 * row['seconds']:.1f} ms ± {1e3 * row['spread'] / 2:.1f}"

    return (
        f"4 KiB took {time_of(small)}, 64 KiB {time_of(medium)}, and 64 MiB {time_of(large)} (median of {TRIALS} "
        "trials ± half of the difference between the slowest and the fastest one)."
    )


def predicted_here() -> str:
    """Render the weak scaling that the alpha-beta model predicts for this machine, beside the measured one."""
    scaling, allreduce = load("scaling"), load("allreduce")
    if not (scaling and allreduce):
        return not_measured("scaling allreduce")
    # Older results files do not have the buckets: they are of the lesson's own network.
    own = {"bucket_bytes": prediction.ddp_buckets(build_model("mnist_cnn", "mnist").parameters())}
    rows = [
        (
            str(row["ranks"]),
            f"{1e3 * row['compute_seconds']:.0f}",
            f"{1e3 * row['all_reduce_seconds']:.0f}",
            *(f"{row[name]:.0%}" for name in prediction.OVERLAPS),
            f"{row['measured'].median:.0%}",
            f"{row['measured'].lowest:.0%} to {row['measured'].highest:.0%}",
        )
        for row in prediction.against_measured(own | scaling, allreduce)
    ]
    header = [
        "ranks",
        "step alone, ms",
        "all-reduces, ms",
        "predicted: no overlap",
        "full overlap",
        "measured",
        "range",
    ]
    return table(header, rows)


def published() -> str:
    """Render the prediction for the published 128-GPU study beside its figures."""
    lines = table(prediction.published_header(), [prediction.published_cells(row) for row in _against_published()])
    return f'{lines}\n\n"Off by" is in percentage points. Computed by `python experiments/predict.py`.'


def calibrated() -> str:
    """Render the prediction for that study with the bandwidth that fits its first figure."""
    return table(prediction.calibrated_header(), [prediction.calibrated_cells(row) for row in _against_published()])


def _against_published() -> list[dict[str, Any]]:
    network = Network(prediction.ALPHA_US * 1e-6, 1e-9 / prediction.GB_PER_SECOND)
    return prediction.against_published(prediction.published_steps(), network)

"""Turn the figures of comparison, scaling study and all-reduce into parts of the READMEs; cog calls this."""

import prediction
from alpha_beta import Network
from lab.render import also_on_gpu, figure, load, mean_std, not_measured, source, table
from scaling_study import KINDS, diagnosis


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
    unit = f"In samples/s, mean ± standard deviation; {results['global_batch_size']} samples per step over all devices."
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
            said.append(f"In {kind}, two ranks and two threads differ by less than the spread, so this is noise.")
        else:
            faster = "faster" if difference > 0 else "slower"
            said.append(f"In {kind}, two ranks are {faster} than two threads, by more than the spread.")
    return "\n".join(said)


@also_on_gpu("scaling")
def scaling(machine: str | None = None) -> str:
    """Render table, plot and diagnoses of the scaling study."""
    results = load("scaling", machine)
    if not results:
        return not_measured("scaling")
    ratios = (
        "efficiency",
        "machine_bound",
        "matrix_bound",
        "share_of_bound",
        "communication_overhead",
        "waiting_for_ranks",
    )
    rows = [
        (
            row["scaling"],
            str(row["ranks"]),
            str(row["batch_size"]),
            *(mean_std(row[kind]) for kind in KINDS),
            *("" if row[name] is None else f"{row[name]:.0%}" for name in ratios),
        )
        for row in results["rows"]
    ]
    shown = ("efficiency", "upper bound", "matrix products", "of the bound", "communication", "waiting for ranks")
    threads = f"{results['threads_per_rank']} thread(s) per rank; samples/s, mean ± standard deviation."
    plot = figure("scaling", "Throughput, efficiency and communication overhead by ranks", machine)
    diagnoses = [f"- {scaling_diagnosis(kind, machine)}" for kind in results["diagnoses"]]
    lines = [table(["scaling", "ranks", "batch per rank", *KINDS, *shown], rows), "", threads, source(results), ""]
    return "\n".join([*lines, *diagnoses, "", plot])


def scaling_diagnosis(kind: str, machine: str | None = None) -> str:
    """Render in words how well weak or strong scaling works."""
    return diagnosis([row for row in load("scaling", machine)["rows"] if row["scaling"] == kind])


@also_on_gpu("allreduce")
def allreduce(machine: str | None = None) -> str:
    """Render the fitted latency and bandwidth of the all-reduce, and its plot."""
    results = load("allreduce", machine)
    if not results:
        return not_measured("allreduce")
    rows = [
        (f"{row['bytes'] / 1024:,.0f}", f"{1e3 * row['seconds']:.3f}", f"{row['bus_gb_per_second']:.3f}")
        for row in results["rows"]
    ]
    beta = f"{1e-9 / results['beta']:.2f} GB/s" if results["beta"] else "no limit in sight"
    fitted = (
        f"{results['world_size']} ranks over {results['backend']}; fitted: {1e6 * results['alpha']:,.0f} µs per "
        f"message (alpha) and {beta} (1 / beta)."
    )
    plot = figure("allreduce", "Time and bus bandwidth of an all-reduce by message size", machine)
    return "\n".join([table(["KiB", "ms", "bus GB/s"], rows), "", fitted, source(results), "", plot])


def predicted_here() -> str:
    """Render the weak scaling that the alpha-beta model predicts for this machine, beside the measured one."""
    scaling, allreduce = load("scaling"), load("allreduce")
    if not (scaling and allreduce):
        return not_measured("scaling allreduce")
    found = prediction.against_measured(scaling, allreduce)
    names = (*prediction.OVERLAPS, "measured", "measured, waiting apart")
    rows = [
        (
            str(row["ranks"]),
            f"{1e3 * row['compute_seconds']:.1f}",
            f"{1e3 * row['all_reduce_seconds']:.1f}",
            *(f"{row[name]:.1%}" for name in names),
        )
        for row in found
    ]
    return table(["ranks", "step alone, ms", "all-reduce, ms", *names], rows)


def published() -> str:
    """Render the prediction for the published 128-GPU study beside its figures."""
    network = Network(prediction.ALPHA_US * 1e-6, 1e-9 / prediction.GB_PER_SECOND)
    rows = prediction.against_published(prediction.published_steps(), network)
    lines = table(prediction.published_header(), [prediction.published_cells(row) for row in rows])
    return f'{lines}\n\n"Off by" is in percentage points. Computed by `python experiments/predict.py`.'

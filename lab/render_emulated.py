"""Turn the figures of the emulated GPU into parts of the pages; cog calls this."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import emulated_figures
from lab.emulated_gpu import PUBLISHED
from lab.render import figure, load, not_measured, source, table

BESIDE = ("](../", "](../../")
"""what makes the paths of a lesson's page those of a page in its folder experiments"""


def mean_std(values: Mapping[str, Any]) -> str:
    """Return samples/s with their standard deviation."""
    digits = 1 if values["mean"] < 1000 else 0
    return f"{values['mean']:,.{digits}f} ± {values['std']:,.{digits}f}"


def milliseconds(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation of the milliseconds of several rounds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {spread:.1f}"


def durations() -> str:
    """Render the published durations that the emulated GPU takes."""
    rows = [
        (f"`--gpu {name}`", found.what, f"{1e3 * found.gpu:.3g}", f"{1e3 * found.load:.3g}" if found.load else "real")
        for name, found in PUBLISHED.items()
    ]
    return table(["flag", "whose", "GPU, ms per sample", "a loader worker, ms per sample"], rows)


def line_table(names: Mapping[str, str]) -> str:
    """Render the time of each line that takes at least 1 % in one of the profiles; ``names`` are the column heads."""
    results = load("emulated_gpu")
    if not results:
        return not_measured("emulated_gpu")
    profiles = {name: {row["text"]: row for row in results["lines"][name]} for name in names}
    first = next(iter(profiles.values()))
    shown = [text for text in first if any(profile[text]["share"] >= 0.01 for profile in profiles.values())]
    rows = [
        (
            f"`{text.partition('  #')[0]}`",
            *(
                f"{milliseconds(profile[text]['milliseconds'])} ({profile[text]['share']:.0%})"
                for profile in profiles.values()
            ),
        )
        for text in shown
    ]
    unit = (
        f"Emulated GPU; milliseconds per step of {results['batch_size']} samples, mean ± standard deviation of "
        f"{results['rounds']} runs, and share of the time. Lines below 1 % in all columns are left out."
    )
    rows.append(("**all lines**", *(milliseconds(step_times(results["lines"][name])) for name in names)))
    return "\n".join([table(["line of `train_one_epoch`", *names.values()], rows), "", unit, source(results)])


def step_times(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the milliseconds per step of all lines of a profile together, in each round."""
    return [sum(found) for found in zip(*(line["milliseconds"] for line in lines), strict=True)]


def before_and_after() -> str:
    """Render the line profile before and after the first change."""
    return line_table({"2 workers": "2 workers", "12 workers, --log_interval 10": "12 workers"})


def where_it_waits() -> str:
    """Render the lines that wait, by how often the loss is read."""
    intervals = (1, 10, 100)
    return line_table({f"12 workers, --log_interval {n}": f"`--log_interval {n}`" for n in intervals})


def v100_share() -> str:
    """Say how large the share of the line of the loader is with the durations of the V100 and real loading."""
    results = load("emulated_gpu")
    if not results:
        return not_measured("emulated_gpu")
    (row,) = [row for row in results["lines"]["V100, 1 worker"] if row["text"].startswith("for ")]
    return (
        f"With one worker the `for` line takes **{row['share']:.0%}** of the time ({results['rounds']} runs, emulated "
        "GPU). In Princeton's published profile it takes 83 %."
    )


def workers() -> str:
    """Render the throughput by number of workers beside the published one."""
    results = load("emulated_gpu")
    if not results:
        return not_measured("emulated_gpu")
    rows = [
        (
            str(row["num_workers"]),
            *(mean_std(row[kind]) for kind in ("IO", "SYNTHETIC", "FULL")),
            f"{row['published']:.1f}" if row["published"] else "",
        )
        for row in results["workers"]
    ]
    header = ["`--num_workers`", "IO", "SYNTHETIC", "FULL", "published FULL (NERSC, A100)"]
    return "\n".join([table(header, rows), "", _unit(results), source(results)])


def _unit(results: Mapping[str, Any]) -> str:
    return f"Emulated GPU; samples/s, mean ± standard deviation of {3 * results['rounds']} trials."


def overlap() -> str:
    """Render published throughputs, both predictions, and what the emulated GPU gives with and without overlap."""
    results = load("emulated_gpu")
    if not results:
        return not_measured("emulated_gpu")
    rows = []
    below, slower = [], []
    for row in results["overlap"]:
        of = row["published"]
        cells = [row["name"], f"{of['IO']:.1f}", f"{of['SYNTHETIC']:.1f}"]
        for how in ("no overlap", "overlap"):
            predicted = row[how]["predicted_from_published"]
            cells += [f"{predicted:.0f}", mean_std(row[how]["FULL"])]
            below.append(1 - row[how]["FULL"]["mean"] / predicted)
            slower.append(1 - row[how]["IO"]["mean"] / of["IO"])
        rows.append((*cells, f"**{of['FULL']:.0f}**"))
    header = ["", "IO", "SYNTHETIC", "no overlap, predicted", "emulated", "full overlap, predicted", "emulated"]
    how_far = (
        "IO, SYNTHETIC and the last column are the published figures, and the predictions follow from these. The "
        f"emulated figures are {100 * min(below):.0f} to {max(below):.0%} below the predictions. One reason is that "
        f"the emulated loader, measured alone, is up to {max(slower):.0%} slower than the published IO. (NERSC "
        "published FULL twice. Here it is that of the tool which measured IO and SYNTHETIC too, in the table above "
        "that of the third epoch of a run.)"
    )
    parts = [table([*header, "published FULL"], rows), "", _unit(results), source(results), "", how_far]
    return "\n".join(parts)


def reading_costs() -> str:
    """Say how long a step of the time lines takes if the loss is read every three steps, and if it is in each."""
    results = load("emulated_gpu")
    if not results:
        return not_measured("emulated_gpu")
    seldom, always = (
        results["timeline_step_milliseconds"][f"the loss is read {when}"] for when in ("every 3 steps", "in every step")
    )
    return (
        f"So without workers, one `loss.item()` per step can prevent all of the overlap: a step takes {always:.0f} ms "
        f"here, in place of {seldom:.0f} ms. (On a CPU, where nothing is asynchronous, only the lower time line is "
        "possible without workers.)"
    )


def v100() -> str:
    """Render the throughput by number of workers with the durations of the V100 and real loading."""
    results = load("emulated_gpu")
    if not results:
        return not_measured("emulated_gpu")
    rows = [
        (str(row["num_workers"]), *(mean_std(row[kind]) for kind in ("IO", "SYNTHETIC", "FULL")))
        for row in results["v100"]
    ]
    header = ["`--num_workers`", "IO (real)", "SYNTHETIC (emulated)", "FULL"]
    return "\n".join([table(header, rows), "", _unit(results), source(results)])


def timeline(name: str, what: str) -> str:
    """Render one of the time lines."""
    results = load("emulated_gpu")
    if not results:
        return not_measured("emulated_gpu")
    link = figure("emulated_gpu", what).replace("emulated_gpu.png", f"{name}.png").replace(*BESIDE)
    return f"{link}\n\n{source(results)}"


def scaling() -> str:
    """Render step times, measured efficiencies and predictions of 1 to 8 ranks with emulated GPUs."""
    results = load("emulated_scaling")
    if not results:
        return not_measured("emulated_scaling")
    rows = []
    for row in results["rows"]:
        alone, model = row["without_communication"], row.get("predicted")
        cells = [str(row["ranks"]), f"{1e3 * alone['mean']:.1f} ± {1e3 * alone['std']:.1f}"]
        cells.append(f"{1e3 * row['all_reduce']['mean']:.1f} ± {1e3 * row['all_reduce']['std']:.1f}" if model else "")
        for kind in emulated_figures.LABELS:
            cells.append(f"{row[kind]['mean']:.1%} ± {row[kind]['std']:.1%}")
            cells.append(f"{model[kind]:.1%}" if model else "")
        rows.append(cells)
    header = ["ranks", "step without communication, ms", "all-reduce alone, ms"]
    for label in emulated_figures.LABELS.values():
        header += [f"efficiency, {label}", "predicted"]
    unit = (
        f"Emulated GPU, real communication over gloo; mean ± standard deviation of "
        f"{results['rounds'] * results['trials']} trials of {results['steps']} steps, in {results['rounds']} rounds."
    )
    return "\n".join([table(header, rows), "", unit, source(results)])


def largest_difference() -> str:
    """Say by how much measured and predicted efficiencies differ at most, and where."""
    results = load("emulated_scaling")
    if not results:
        return not_measured("emulated_scaling")
    differences = {
        (row["ranks"], label): row[kind]["mean"] - row["predicted"][kind]
        for row in results["rows"]
        for kind, label in emulated_figures.LABELS.items()
        if "predicted" in row
    }
    (ranks, label), largest = max(differences.items(), key=lambda item: abs(item[1]))
    return (
        f"They differ most with {ranks} ranks and {label}: the measured efficiency is {100 * abs(largest):.1f} "
        f"percentage points {'higher' if largest > 0 else 'lower'}."
    )


def scaling_figure(what: str) -> str:
    """Render the figure of the efficiencies."""
    if not load("emulated_scaling"):
        return not_measured("emulated_scaling")
    return figure("emulated_scaling", what).replace(*BESIDE)


def published_points() -> str:
    """Render what NERSC published of the same ratio, beside what the alpha-beta model predicts for it."""
    rows = []
    for point in emulated_figures.POINTS:
        (none, full), *_ = emulated_figures.published_curves([point.gpus])[point.batch_size]
        rows.append((str(point.gpus), str(point.batch_size), f"{point.efficiency:.0%}", f"{none:.0%}", f"{full:.0%}"))
    return table(["GPUs", "batch per GPU", "published", "predicted, no overlap", "predicted, full overlap"], rows)


def at_1024() -> str:
    """Say what the model predicts for 1,024 GPUs."""
    parts = [
        f"with a batch of {batch_size} per GPU, {none:.0%} without overlap and {full:.0%} with full overlap"
        for batch_size, [(none, full)] in emulated_figures.published_curves([1024]).items()
    ]
    return f"For 1,024 GPUs the model predicts the following efficiencies: {'; '.join(parts)}."

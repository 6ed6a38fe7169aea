"""Render the experiments of lesson 05's page "Beyond": layouts, pipelines, and what can be combined with FSDP2."""

import json
import re
from typing import Any

from lab.render import RESULTS, source, table

FOLDER = RESULTS / "beyond"
COMBINATION_WORDS = {
    "equal": "equal",
    "close": "close",
    "differs": "**differs**",
    "works": "works",
    "fails": "**fails**",
    "refused": "refused",
}
FACTS = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "kept MB": "MB kept for backward",
    "graphs": "graphs compiled",
    "stored": "stored as",
    "weights that moved": "weights that moved",
    "norm": "norm",
    "step skipped on ranks 0, 1": "step skipped on ranks 0, 1",
}
"""facts of a combination that the page shows, and their names there"""


def read(name: str) -> dict[str, Any]:
    """Return the results in results/beyond/NAME.json; empty if there are none."""
    file = FOLDER / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def tensor_parallel(ranks: int) -> str:
    """Render the collectives, the bytes and the weights of each layout of this many ranks."""
    results = read(f"tensor_parallel_{ranks}_ranks")
    if not results:
        return missing(f"torchrun --standalone --nproc-per-node {ranks} experiments/tensor_parallel.py")
    rows = [
        (
            row["name"],
            *(str(row["step"].get(kind, 0)) for kind in ("all_gather", "reduce_scatter", "all_reduce")),
            f"{sum(row['bytes'].values()) / 1e6:.2f}",
            f"{row['weights_on_rank0']:,}",
            f"{max(row['loss_difference'], row['weight_difference']):.0e}",
        )
        for row in results["rows"]
    ]
    header = ["layout", "all-gathers", "reduce-scatters", "all-reduces", "MB", "weights on rank 0", "differs by"]
    about = (
        f"{results['parameters']:,} weights, {results['batch_size']} samples per step. Collectives and MB are those of "
        "one step of one rank. MB: the sizes of the whole tensors that are gathered, reduced or summed, added up. "
        "*Differs by* is the largest difference from one process, of the losses of four steps and of the "
        "weights after them."
    )
    return "\n".join([table(header, rows), "", about, source(results)])


def placements() -> str:
    """Render where the parts of one weight are, in each layout of four ranks."""
    results = read("tensor_parallel_4_ranks")
    if not results:
        return missing("torchrun --standalone --nproc-per-node 4 experiments/tensor_parallel.py")
    rows = [
        (
            row["name"],
            f"`{row['up_weight']['placements'].removeprefix('(').removesuffix(')').rstrip(',')}`",
            " x ".join(map(str, row["up_weight"]["local_shape"])),
        )
        for row in results["rows"]
        if "PrepareModuleInput" not in row["name"]
    ]
    shape = " x ".join(map(str, results["rows"][0]["up_weight"]["shape"]))
    return table(["layout", f"placements of a weight of {shape}", "part on rank 0"], rows)


def pipeline(ranks: int) -> str:
    """Render the idle share and the stored activations of each schedule on this many ranks."""
    results = read(f"pipeline_{ranks}_ranks")
    if not results:
        return missing(f"torchrun --standalone --nproc-per-node {ranks} experiments/pipeline.py")
    rows = [
        (
            row["schedule"],
            str(row["microbatches"]),
            f"{1e3 * row['step_seconds']:.0f}",
            f"{row['idle_share']:.0%}",
            f"{row['predicted_idle_share']:.0%}",
            ", ".join(map(str, row["stored_microbatches"])),
            f"{row['loss_difference']:.0e}",
        )
        for row in results["rows"]
    ]
    header = ["schedule", "micro-batches", "ms per step", "idle", "predicted", "stored on rank 0, 1, ...", "loss"]
    about = (
        f"Emulated computation ({results['milliseconds']:g} ms for a forward pass, twice as long for backward), real "
        "communication; the fastest of three steps, after a first one. *Stored*: micro-batches whose activations a "
        "rank keeps at the most. *Loss*: largest difference from one process."
    )
    return "\n".join([table(header, rows), "", about, source(results)])


def pipeline_figure(ranks: int) -> str:
    """Return the time line of the pipelines on this many ranks, for a page in 05_fully_sharded/experiments."""
    what = f"Time line of {ranks} ranks: forward and backward of each micro-batch with GPipe and with 1F1B"
    return f"![{what}](../../results/beyond/pipeline_{ranks}_ranks.png)"


def compositions() -> list[dict[str, Any]]:
    """Return the results of the combinations, of the newest version of PyTorch first."""
    found = [json.loads(file.read_text()) for file in FOLDER.glob("composition_torch_*.json")]
    return sorted(found, key=version, reverse=True)


def version(results: dict[str, Any]) -> tuple[int, ...]:
    """Return the version of PyTorch as numbers that can be compared."""
    return tuple(map(int, re.findall(r"\d+", results["versions"]["torch"].partition("+")[0])))


def torch_name(results: dict[str, Any]) -> str:
    """Return the version of PyTorch without its last number, for the head of a column."""
    return "torch " + ".".join(map(str, version(results)[:2]))


def composition(group: str) -> str:
    """Render the combinations of one group: a row for each, a column for each version of PyTorch."""
    measured = compositions()
    if not measured:
        return missing("torchrun --standalone --nproc-per-node 2 experiments/composition.py")
    by_version = {
        torch_name(results): {row["name"]: row for row in results["rows"] if row["group"] == group}
        for results in measured
    }
    rows = []
    for name in next(iter(by_version.values())):
        found = {torch: of_group[name] for torch, of_group in by_version.items() if name in of_group}
        outcomes = [outcome(found[torch]) if torch in found else "not measured" for torch in by_version]
        rows.append((code(name), *outcomes, details(found)))
    return table(["combination", *by_version, "seen"], rows)


def composition_source() -> str:
    """Return the captions: where the combinations were measured, one line for each version of PyTorch."""
    return "\n".join(map(source, compositions()))


def counts() -> str:
    """Render one sentence on how many combinations came out how."""
    measured = compositions()
    if not measured:
        return missing("torchrun --standalone --nproc-per-node 2 experiments/composition.py")
    rows = measured[0]["rows"]
    number = {status: sum(row["status"] == status for row in rows) for status in COMBINATION_WORDS}
    return (
        f"Of {len(rows)} combinations on {torch_name(measured[0])}, {number['equal']} give the losses and weights of "
        f"one process, {number['close']} compute in 16 bits and are close, {number['differs']} train something else "
        f"without any error, {number['fails']} fail with an error, {number['refused']} are refused by the lesson, and "
        f"{number['works']} is a yes-or-no check that works."
    )


def outcome(row: dict[str, Any]) -> str:
    """Return what came of a combination, in one or two words."""
    found = COMBINATION_WORDS[row["status"]]
    return f"{found}, {row['loss_difference']:.0e}" if "loss_difference" in row else found


def details(rows: dict[str, dict[str, Any]]) -> str:
    """Return what was seen, facts or the error; ``rows`` has them by version of PyTorch, if they are not alike.

    Errors of one type are alike, because their messages change from version to version.
    """
    alike = {row["error"].partition(":")[0] if row["status"] == "fails" else detail(row) for row in rows.values()}
    if len(alike) == 1:
        return detail(next(iter(rows.values())))
    return "; ".join(f"{name}: {detail(row) or '-'}" for name, row in rows.items())


def detail(row: dict[str, Any]) -> str:
    """Return the facts of a combination, or its error, in one line that fits into a cell of a table."""
    if "error" in row:
        message = row["error"].replace("|", "/")
        short = message if len(message) <= 160 else f"{message[:157]}..."
        return short if row["status"] == "refused" else f"`{short.replace('`', '')}`"
    facts = row.get("facts", {})
    return ", ".join(f"{name}: {facts[key]}" for key, name in FACTS.items() if key in facts)


CODE = "|".join(
    (
        r"\b(?:torch|model|block|copy|module)\.\w+(?:\.\w+)*(?:\([\w.]*\))?(?: = partial\([\w., ]*\))?",
        r"\b[a-z]+(?:_[a-z0-9]+)+(?:\(\w*\))?",
        r"\bCPUOffloadPolicy\([\w=]*\)",
        r"\b(?:fused|foreach)=\w+",
        r"\b(?:MixedPrecisionPolicy|GradScaler|DistributedDataParallel)\b",
    )
)


def code(name: str) -> str:
    """Set the calls in the name of a combination as code."""
    return name if name.startswith("`") else re.sub(CODE, r"`\g<0>`", name)


def missing(command: str) -> str:
    """Say that the results are missing, and how to measure them."""
    return f"*Not measured yet: `{command} --out ../results/beyond`.*"

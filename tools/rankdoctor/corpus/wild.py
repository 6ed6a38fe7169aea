"""Write the counts and the table of docs/wild.md from the labels of corpus.toml.

    python corpus/wild.py

The labels were made by reading the scripts. Counted are scripts that several ranks run; a script can have several
faults.
"""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "wild.md"
ONE_PROCESS = ("single", "dataparallel")
FIXES = {
    "same order each epoch": "`sampler.set_epoch(epoch)` before each epoch",
    "lost state": "save and load the state of optimizer, scheduler and scaler too",
    "same samples": "a share of the samples per rank: `DistributedSampler`, after the same order on all ranks",
    "shared file": "let rank 0 alone write, or give each rank another file",
    "wrong metric": "add up sums and counts, and divide once at the end",
    "epoch repeated": "save the number of the next epoch",
    "ranks differ": "let DDP average all gradients, and change weights and learning rates equally on all ranks",
    "zero gradient": "a loss that fits the output (one output: `mse_loss`)",
    "not combined": "`dist.all_reduce` the sums and counts before rank 0 prints them",
    "no eval mode": "`model.eval()` before the validation",
    "gradients never cleared": "`optimizer.zero_grad()` in each step",
    "16-bit weights": "weights in float32, computing in 16 bits (autocast, `MixedPrecisionPolicy`)",
    "validation trained on": "`random_split(..., generator=...)` with the same seed on all ranks",
    "clipping before unscale": "`scaler.unscale_(optimizer)` before the clipping",
    "mask": "a mask that hides the future: minus infinity, or `is_causal`",
    "weights never initialized": "`reset_parameters()` of all layers after `to_empty()`",
    "hang": "every rank calls every collective",
    "no train mode": "`model.train()` at the beginning of each epoch",
    "softmax twice": "give the loss the outputs before softmax",
}
"""the fix of each kind of fault"""


def scripts() -> list[dict[str, Any]]:
    """Return the scripts of the corpus that several ranks run."""
    found = tomllib.loads((HERE / "corpus.toml").read_text())["script"]
    return [script for script in found if script["kind"] not in ONE_PROCESS]


def kinds() -> str:
    """Return the table of kinds of faults: in how many scripts, and the fix."""
    found = Counter(kind for script in scripts() for kind in {fault["kind"] for fault in script["faults"]})
    by_count = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    rows = [f"| {kind} | {count} | {FIXES[kind]} |" for kind, count in by_count]
    return "\n".join(["| fault | scripts | fix |", "| --- | ---: | --- |", *rows])


def counts() -> str:
    """Return the sentence with the counts."""
    every = scripts()
    faulty = [script for script in every if script["faults"]]
    repositories = [len({script["repository"] for script in some}) for some in (every, faulty)]
    return (
        f"{len(faulty)} of {len(every)} scripts have at least one silent fault, in {repositories[1]} of "
        f"{repositories[0]} repositories."
    )


def page_with_tables(page: str) -> str:
    """Return the page with the present tables between its marks."""
    for name, text in (("counts", counts()), ("kinds", kinds())):
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))

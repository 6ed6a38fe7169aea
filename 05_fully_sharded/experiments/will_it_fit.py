"""Will it fit? How many bytes of tensors each rank needs, for any number of ranks, without a GPU.

    python experiments/will_it_fit.py --model vit --ranks 2,8                   # every way of sharing the model
    python experiments/will_it_fit.py --model gpt_7b --ranks 8,64,8x8 --ways ddp,blocks    # 6.7 billion weights
    python experiments/will_it_fit.py --check true                              # is that what two ranks allocate?

"8x8" are 8 groups of 8 ranks, each of which has the whole model (HSDP). You should see that DDP needs as much on any
number of ranks, that sharding per block needs least, and that from some number of ranks on more ranks save nothing:
activations are not sharded. The seconds of a step are bounds: nothing but communication and matrix products, at the
speeds of a data sheet.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import run, torchrun
from memory_model import NOT_COUNTED, UPDATES, WAYS, WORKLOADS, Setup, predict, workload
from memory_on_ranks import setups as checked_setups
from step_time import step_bounds
from workshop.config import require_positive
from workshop.errors import nearest, run_reporting_user_errors

GB = 1e9
LESSON_FOLDER = Path(__file__).resolve().parents[1]
TOGETHER = {
    "weights, optimizer": ("parameters", "optimizer state"),
    "gradients": ("gradients", "gradients to send"),
    "gathered weights": ("gathered weights",),
    "activations": ("activations", "batch"),
    "temporaries": ("temporaries",),
}
"""columns, and what is counted in each: weights with the optimizer state, because a rank stores both all the time"""


def words(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads some of these words, separated by commas."""

    def read(text: str) -> list[str]:
        for word in text.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"does not know '{word}'; {nearest(word, known)}")
        return text.split(",")

    return read


def layouts(text: str) -> list[tuple[int, int]]:
    """Read numbers of ranks, such as 8,64,8x8; return for each the groups that have the whole model, and all ranks."""
    found = []
    for word in text.split(","):
        groups, _, ranks = word.rpartition("x")
        try:
            found.append((int(groups or 1), int(groups or 1) * int(ranks)))
        except ValueError:
            found.append((0, 0))
    if not all(groups > 0 and ranks > 0 for groups, ranks in found):
        raise argparse.ArgumentTypeError(f"takes numbers of ranks such as 8,64,8x8, got '{text}'")
    return found


def name_of(setup: Setup) -> str:
    """Return how the model is shared, and by how many ranks."""
    way = "DDP" if setup.way == "ddp" else f"`{setup.way}`"
    groups = f" in {setup.replicas} groups (HSDP)" if setup.replicas > 1 else ""
    return f"{way} on {setup.ranks:,}{groups}{', recomputed' if setup.checkpointing else ''}"


def setups_of(arguments: argparse.Namespace) -> list[Setup]:
    """Return what the flags ask."""
    checkpointing = {"both": (False, True), "true": (True,), "false": (False,)}[arguments.checkpointing]
    return [
        Setup(
            model=arguments.model,
            depth=arguments.num_blocks,
            batch_size=arguments.batch_size,
            ranks=ranks,
            way=way,
            checkpointing=recomputed,
            replicas=groups,
            precision=arguments.precision,
            update=arguments.update,
        )
        for way in arguments.ways
        for groups, ranks in arguments.ranks
        for recomputed in checkpointing
        if way != "ddp" or groups == 1
    ]


def forecast(arguments: argparse.Namespace) -> None:
    """Store the most bytes per rank and the bounds of a step's time, for each way, choice and number of ranks."""
    print(workload(arguments.model).what, flush=True)
    memory: list[list[results.Cell]] = []
    times: list[list[results.Cell]] = []
    for setup in setups_of(arguments):
        # DDP needs as much on any number of ranks, so that is computed once.
        found = predict(replace(setup, ranks=1) if setup.way == "ddp" else setup)
        sums = [sum(found.parts[part] for part in parts) / GB for parts in TOGETHER.values()]
        memory.append([name_of(setup), *sums, found.peak / GB, found.moment])
        computing, sending = step_bounds(setup)
        times.append([name_of(setup), computing, sending, max(computing, sending), computing + sending])
    asked = f"batch {arguments.batch_size} per rank, {arguments.precision}, AdamW"
    results.store(
        f"will_it_fit_{arguments.model}",
        title="What a rank holds at the moment of the step when it holds most",
        columns=["GB", *TOGETHER, "peak", "it is in"],
        rows=memory,
        formats=dict.fromkeys((*TOGETHER, "peak"), ",.2f" if arguments.model.startswith("gpt_") else ",.4f"),
        unit="GB per rank, computed",
        spread=asked,
    )
    columns = ["computing", "communication", "a step, full overlap", "no overlap"]
    results.store(
        f"will_it_fit_{arguments.model}_seconds",
        title="Bounds of the time of a step",
        columns=["seconds", *columns],
        rows=times,
        formats=dict.fromkeys(columns, ",.3g"),
        unit="seconds, computed from data sheets",
        spread=asked,
    )
    print(f"\n{NOT_COUNTED}")


def check() -> None:
    """Start two ranks that measure what they allocate; store it with what was predicted for them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bytes.json")
        script = Path(__file__).resolve().with_name("memory_on_ranks.py")
        run([*torchrun(2), script, file], LESSON_FOLDER, threads=1, quiet=True)
        found = json.loads(file.read_text())
    rows: list[list[results.Cell]] = []
    for setup, measured in zip(checked_setups(found["update"]), found["bytes"], strict=True):
        predicted = predict(replace(setup, ranks=1) if setup.way == "ddp" else setup).peak
        name = "DDP" if setup.way == "ddp" else f"`{setup.way}`"
        recomputed = "yes" if setup.checkpointing else "no"
        rows.append([name, recomputed, predicted / 1e6, measured / 1e6, measured / predicted - 1])
    results.store(
        "will_it_fit_check",
        title="Predicted and measured",
        columns=["", "checkpointing", "predicted, MB per rank", "measured", "difference"],
        rows=rows,
        formats={"predicted, MB per rank": ",.2f", "measured": ",.2f", "difference": "+.1%"},
    )


def main() -> None:
    """Forecast, or check the forecast."""
    parser = Parser(__doc__)
    parser.add_argument("--model", default="vit", help=f"one of {', '.join(WORKLOADS)} (default: %(default)s)")
    parser.add_argument("--num_blocks", type=int, default=0, help="number of blocks, if not that of the model")
    parser.add_argument("--ranks", type=layouts, default=[(1, 8)], metavar="N,...", help="default: 8")
    parser.add_argument("--batch_size", type=int, default=1, help="samples per rank (default: %(default)s)")
    parser.add_argument("--ways", type=words(WAYS), default=list(WAYS), help=f"some of {','.join(WAYS)} (default: all)")
    parser.add_argument(
        "--checkpointing", choices=("both", "true", "false"), default="both", help="activation checkpointing"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="default: %(default)s")
    parser.add_argument("--update", choices=UPDATES, default="foreach", help="the optimizer's (default: %(default)s)")
    parser.add_argument(
        "--check", choices=("true", "false"), default="false", help="compare with two real ranks on this machine"
    )
    arguments = parser.parse_args()
    require_positive(arguments, "batch_size")
    if arguments.check == "true":
        check()
    else:
        forecast(arguments)


if __name__ == "__main__":
    run_reporting_user_errors(main)

"""Will it fit, how long will it take, what will it cost? Memory, seconds and GPU-hours, without a GPU.

    python experiments/will_it_fit.py --model gpt2_124m --ranks 2,8             # every way of sharing the model
    python experiments/will_it_fit.py --model gpt_7b --ranks 8,64,8x8 --ways ddp,blocks    # 6.6 billion weights
    python experiments/will_it_fit.py --published true                          # beside what others have measured

"8x8" are 8 groups of 8 ranks, each of which has the whole model (HSDP). You should see that DDP needs as much on any
number of ranks, that sharding per block needs least, and that from some number of ranks on more ranks save nothing:
activations are not sharded. The seconds are an estimate: the operations at 40 % of the peak of an H100, and the bytes
at the speeds of data sheets. Nothing else is counted: no loading, no waiting for slow ranks, no time to start kernels.
"""

import argparse
from collections.abc import Callable, Iterable

from lab import results
from lab.flags import Parser
from memory_model import NOT_COUNTED, UPDATES, WAYS, WORKLOADS, Setup, predict, workload
from published import compare
from step_time import SHARE_OF_PEAK, Network, communication_seconds, compute_seconds
from workshop.config import require_positive
from workshop.errors import UserError, nearest, run_reporting_user_errors

GB = 1e9
TOKENS_PER_PARAMETER = 20
"""about what uses a number of operations best: Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, table A3"""
MEMORY = ("stored between steps", "kept for backward", "forward", "backward", "optimizer", "peak", "reserved")
"""columns of bytes; three of them are the peaks of the parts of a step"""


def words(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads some of these words, separated by commas."""

    def read(text: str) -> list[str]:
        for word in text.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"does not know '{word}'; {nearest(word, known)}")
        return text.split(",")

    return read


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return what reads one of these words."""
    return lambda text: words(known)(text)[0]


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
            parts=arguments.accumulate,
        )
        for way in arguments.ways
        for groups, ranks in arguments.ranks
        for recomputed in checkpointing
        if way != "ddp" or groups == 1
    ]


def forecast(arguments: argparse.Namespace) -> None:
    """Store the bytes of a rank, and the time and cost of a training, for each way and number of ranks."""
    model = workload(arguments.model)
    network = Network(arguments.adapters, arguments.adapter_gb_per_second)
    tokens = arguments.tokens or TOKENS_PER_PARAMETER * model.size.parameters
    memory: list[list[results.Cell]] = []
    times: list[list[results.Cell]] = []
    setups = setups_of(arguments)
    for setup, found in zip(setups, predict(*setups), strict=True):
        sizes = (found.stored, found.kept, *found.peaks.values(), found.peak, found.reserved)
        memory.append([name_of(setup), *(size / GB for size in sizes), found.moment])
        computing, sending = compute_seconds(setup), communication_seconds(setup, network)
        of_step = setup.batch_size * model.sequence_length
        speeds = [of_step / seconds for seconds in (computing + sending, max(computing, sending))]
        gpu_hours = [tokens / speed / 3600 for speed in reversed(speeds)]
        times.append([name_of(setup), computing, sending, *speeds, *gpu_hours, gpu_hours[0] / setup.ranks / 24])
    parts = f", in {arguments.accumulate} parts" if arguments.accumulate > 1 else ""
    asked = f"{arguments.batch_size} x {model.sequence_length:,} tokens per rank{parts}, {arguments.precision}, AdamW"
    results.store(
        f"will_it_fit_{arguments.name or arguments.model}",
        title="Stored between two steps, kept for backward, and the peak of each part of a step",
        columns=["GB", *MEMORY, "it is in"],
        rows=memory,
        formats=dict.fromkeys(MEMORY, ",.3f" if model.size.parameters < 1e9 else ",.2f"),
        unit="GB per rank, computed",
        spread=asked,
    )
    seconds = ["computing, s", "communication, s"]
    speed = ["tokens/s per GPU, no overlap", "full overlap"]
    cost = ["GPU-hours, full overlap", "no overlap", "days, full overlap"]
    results.store(
        f"how_long_{arguments.name or arguments.model}",
        title=f"A step, and a training on {tokens / 1e9:,.1f} billion tokens",
        columns=["", *seconds, *speed, *cost],
        rows=times,
        formats=dict.fromkeys(seconds, ",.3g") | dict.fromkeys((*speed, *cost[:2]), ",.0f") | {cost[2]: ",.3g"},
        spread=f"computed; {asked}, {network.adapters} x {network.gb_per_second:g} GB/s per node of 8 H100, "
        f"{SHARE_OF_PEAK:.0%} of the peak",
    )
    print(f"\n{NOT_COUNTED}")


def main() -> None:
    """Forecast, or compare the forecast with published figures."""
    parser = Parser(__doc__)
    models = ", ".join(WORKLOADS)
    parser.add_argument("--model", default="gpt_tiny", type=one_of(WORKLOADS), help=f"one of {models}")
    parser.add_argument("--num_blocks", type=int, default=0, help="number of blocks, if not that of the model")
    parser.add_argument("--ranks", type=layouts, default=[(1, 8)], metavar="N,...", help="default: 8")
    parser.add_argument("--batch_size", type=int, default=1, help="samples per rank (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="parts that a batch is computed in (default: 1)")
    parser.add_argument("--ways", type=words(WAYS), default=list(WAYS), help=f"some of {','.join(WAYS)} (default: all)")
    parser.add_argument(
        "--checkpointing", choices=("both", "true", "false"), default="both", help="activation checkpointing"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="default: %(default)s")
    parser.add_argument("--update", choices=UPDATES, default="fused", help="the optimizer's (default: %(default)s)")
    parser.add_argument("--adapters", type=int, default=8, help="network adapters of a node (default: 8)")
    parser.add_argument(
        "--adapter_gb_per_second", type=float, default=50.0, help="that each of them sends (default: 50)"
    )
    parser.add_argument("--tokens", type=float, help="to train on (default: 20 for each weight)")
    parser.add_argument("--name", help="of the stored tables (default: that of the model)")
    parser.add_argument(
        "--published", choices=("true", "false"), default="false", help="compare with what others have measured"
    )
    arguments = parser.parse_args()
    require_positive(arguments, "batch_size", "accumulate", "adapters", "adapter_gb_per_second", "tokens")
    if arguments.batch_size % arguments.accumulate:
        raise UserError(
            f"--batch_size {arguments.batch_size} cannot be divided into {arguments.accumulate} equal parts"
        )
    if arguments.published == "true":
        compare()
    else:
        forecast(arguments)


if __name__ == "__main__":
    run_reporting_user_errors(main)

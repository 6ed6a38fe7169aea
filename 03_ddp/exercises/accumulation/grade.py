"""Each update must equal that of one large batch, and must not need more communication than one batch."""

from collections.abc import Iterator

from clinic.runs import Observed, Script, difference, percent

TRAIN = 160
"""ten batches on each of two ranks: two groups of four, and half a group"""
UPDATES = 3
BATCH = 8
FLAGS = ("--batch_size", BATCH, "--optimizer", "sgd", "--lr", 0.1, "--dropout", "false")
CLOSE = 1e-5
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""
SMALLEST = 10
"""numbers in the smallest weight of the model: all-reduces of fewer are no gradients, but what the ranks agree on"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = train(script, 2, operations=True, graphs=True)
    updates = len(run[0].updates)
    if (most := max(call.size for call in run[0].training)) > BATCH:
        yield f"with --batch_size {BATCH}, one forward pass has {most} samples, but only {BATCH} fit into memory"
    if (graphs := max(rank.graphs[1] for rank in run.ranks)) > 1:
        yield f"the activations of {graphs} batches are in memory at once, but only those of one batch fit"
    if updates > UPDATES:
        samples = f"{TRAIN} samples on two ranks in batches of {BATCH}"
        yield f"{samples} made {updates} updates; with groups of four batches they must make {UPDATES}"
    if unused := sum(call.size for rank in run.ranks for call in rank.training if call.updates == updates):
        yield f"the last {unused} samples that were trained on are part of no update"
    if left := TRAIN - len({sample for rank in run.ranks for sample in rank.trained}):
        yield f"{left} of {TRAIN} samples were trained on by no rank"
    for ranks, found in ((2, run), (3, train(script, 3))):
        if wrong := wrong_gradient(found, train(script.as_started(), ranks)):
            yield f"with {ranks} ranks, {wrong}"
            break
    for update, sent in enumerate(numbers_sent(run), 1):
        if sent > 1.01:
            yield f"for update {update}, the ranks reduced {sent:.1f} times as many numbers as there are weights"
            break
    if any(numbers_sent(train(script, 2, "--sync_gradients", "false", operations=True))):
        yield "with --sync_gradients false, the ranks still exchange gradients: it no longer measures what that costs"


def train(script: Script, ranks: int, *flags: str, **what: bool) -> Observed:
    """Run an epoch."""
    return script.run(*FLAGS, *flags, ranks=ranks, train=TRAIN * ranks // 2, val=32, **what)


def wrong_gradient(found: Observed, expected: Observed) -> str | None:
    """Return which gradient differs from that of the script as started, in which only the communication is wrong."""
    for number, rank in enumerate(found.ranks):
        for step, (update, wanted) in enumerate(zip(rank.updates, expected[0].updates, strict=False), 1):
            off = difference(update.gradient, wanted.gradient)
            if not off < CLOSE:
                what = f"the gradient of update {step} on rank {number} differs by {percent(off)}"
                return f"without dropout, {what} from that of one batch of the same samples"
    return None


def numbers_sent(run: Observed) -> list[float]:
    """Return how many numbers were reduced for each update, relative to the weights of the model."""
    weights = sum(weight.numel() for weight in run[0].weights.values())
    large = [op for op in run[0].operations if op.name == "allreduce" and op.numel >= SMALLEST]
    return [sum(op.numel for op in large if op.updates == step) / weights for step in range(len(run[0].updates))]

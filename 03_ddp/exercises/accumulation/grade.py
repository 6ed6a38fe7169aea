"""Each update must equal that of one large batch, and must not need more communication than one batch."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clinic.coded import label_of
from clinic.notes import GraphCounter, before_each_update
from clinic.observe import Observed, Script, percent

TRAIN = 160
"""ten batches on each of two ranks: two groups of four, and half a group"""
UPDATES = 3
BATCH = 8
CLOSE = 1e-5
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    flags = ("--batch_size", BATCH, "--optimizer", "sgd", "--lr", 0.1)
    run = script.run(*flags, ranks=2, train=TRAIN, val=32, keep=True, watch=note_traffic)
    updates = len(run[0].updates)
    if updates == 0:
        yield "it makes no update"
        return
    if (most := max(len(call.samples) for rank in run.ranks for call in rank.shown if call.training)) > BATCH:
        yield f"with --batch_size {BATCH}, one forward pass has {most} samples, but only {BATCH} fit into memory"
    if (graphs := max(rank.extra["pending"] for rank in run.ranks)) > 1:
        yield f"the activations of {graphs} batches are in memory at once, but only those of one batch fit"
    if updates > UPDATES:
        samples = f"{TRAIN} samples on two ranks in batches of {BATCH}"
        yield f"{samples} made {updates} updates; with groups of four batches they must make {UPDATES}"
    calls = [call for rank in run.ranks for call in rank.shown if call.training and call.updates == updates]
    if calls:
        unused = sum(len(call.samples) for call in calls)
        yield f"the last {unused} samples that were trained on are part of no update"
    if left := TRAIN - len({sample for rank in run.ranks for sample in rank.trained}):
        yield f"{left} of {TRAIN} samples were trained on by no rank"
    if wrong := first(wrong_gradients(run)):
        yield from wrong
    else:
        more = script.run(*flags, ranks=3, train=TRAIN * 3 // 2, val=32, keep=True, watch=note_traffic)
        yield from (f"with 3 ranks, {line}" for line in first(wrong_gradients(more)))
    yield from first(needless_traffic(run))


def first(found: Iterator[str]) -> list[str]:
    """Return the first of these lines, if there is any."""
    return [line for line in [next(found, None)] if line]


def wrong_gradients(run: Observed) -> Iterator[str]:
    """Compare the gradients that the optimizers get with that of one batch of all samples since the update before."""
    for number, weights in enumerate(run[0].extra["weights"]):
        model = run[0].extra["model"]
        vector_to_parameters(weights, model.parameters())
        calls = [call for rank in run.ranks for call in rank.shown if call.training and call.updates == number]
        targets = label_of(torch.tensor([sample for call in calls for sample in call.samples]))
        loss = F.cross_entropy(model(torch.cat([call.inputs for call in calls])), targets)
        expected = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        for other, rank in enumerate(run.ranks):
            gradient = rank.updates[number].gradient
            off = ((gradient - expected).norm() / expected.norm()).item()
            if not off < CLOSE:
                yield (
                    f"without dropout, the gradient of update {number + 1} on rank {other} differs by {percent(off)} "
                    f"from that of one batch of the same {len(targets)} samples"
                )


def needless_traffic(run: Observed) -> Iterator[str]:
    """Compare how many numbers are reduced for an update with how many weights the model has."""
    for number, sent in enumerate(run[0].extra["sent"]):
        times = sent / len(run[0].extra["weights"][0])
        if times > 1.01:
            yield f"for update {number + 1}, the ranks reduced {times:.1f} times as many numbers as there are weights"


def note_traffic(script: Path) -> Callable[[], dict[str, Any]]:
    """Log, before each update, the weights and how many numbers were reduced since the last one; turn dropout off."""
    noted: dict[str, Any] = {"model": None, "weights": [], "sent": []}
    graphs = GraphCounter()
    sent = 0
    F.dropout = lambda input, *_, **__: input
    own_register, own_all_reduce = DistributedDataParallel.register_comm_hook, dist.all_reduce

    def register(ddp: DistributedDataParallel, state: object, hook: Callable) -> None:
        def counted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal sent
            sent += bucket.buffer().numel()
            return hook(state, bucket)

        counted.__annotations__ = {}
        own_register(ddp, state, counted)

    def all_reduce(tensor: torch.Tensor, *arguments: object, **keywords: object) -> Any:  # noqa: ANN401
        nonlocal sent
        if sys._getframe(1).f_code.co_filename == str(script) and tensor.numel() > 1:
            sent += tensor.numel()
        return own_all_reduce(tensor, *arguments, **keywords)

    def before_forward(module: nn.Module, arguments: tuple) -> None:
        is_model = module.training and next(module.parameters(), None) is not None
        if noted["model"] is None and is_model and not arguments[0].is_meta:
            noted["model"] = copy.deepcopy(getattr(module, "module", module)).eval()

    def before_update(optimizer: torch.optim.Optimizer) -> None:
        nonlocal sent
        if len(noted["weights"]) < 5:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            noted["weights"].append(parameters_to_vector(weights).detach().clone())
            noted["sent"].append(sent)
        sent = 0

    DistributedDataParallel.register_comm_hook = register
    dist.all_reduce = all_reduce
    register_module_forward_pre_hook(before_forward)
    before_each_update(before_update)
    return lambda: noted | {"pending": graphs.most_pending}

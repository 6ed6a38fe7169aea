"""Run by test_train_05.py as two ranks: padded sequences, in parts, on ranks with unequal numbers of tokens.

Rank 0 writes the differences of weights and losses from one plain process, after two steps.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lab.launching import load_script
from workshop.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "05_fully_sharded/experiments"))
from sharded_models import training_of  # noqa: E402

LESSON = load_script(REPOSITORY / "05_fully_sharded")
FLAGS = {"width": 64, "depth": 2, "sequence_length": 16, "lr": 0.003, "optimizer": "sgd", "max_grad_norm": 0.1}
CPU = torch.device("cpu")


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two batches of 8 sequences of 2 to 16 tokens, padded."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(2):
        sequences = torch.randint(256, (8, 17), generator=generator)
        inputs, targets = sequences[:, :-1], sequences[:, 1:].clone()
        for row, length in enumerate((2, 16, 3, 5, 16, 15, 14, 16)):
            targets[row, length:] = LESSON.IGNORED
        found.append((inputs, targets))
    return found


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process, whose loss is the mean over the tokens of a batch."""
    torch.manual_seed(0)
    model = LESSON.make_model(LESSON.Config(**FLAGS))
    optimizer = torch.optim.SGD(model.parameters(), lr=FLAGS["lr"], momentum=0.9)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), FLAGS["max_grad_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def on_ranks(ranks: Ranks, **flags: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same with the lesson's step on this rank's half of each batch."""
    config = LESSON.Config(**FLAGS | flags)
    torch.manual_seed(0)
    model = LESSON.distribute_model(config, ranks)
    training = training_of(config, model, ranks)
    losses = []
    for batch in batches():
        inputs, targets = (part.chunk(ranks.world_size)[ranks.rank] for part in batch)
        loss_sum, tokens, _ = LESSON.train_step(config, training, inputs, targets)
        sums = torch.stack((loss_sum.double(), tokens.double()))
        dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


dist.init_process_group("gloo")
ranks = Ranks(device=CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
expected, weights = plain()
found = {}
for name, flags in {
    "FSDP": {},
    "FSDP, parts": {"accumulate": 2},
    "DDP": {"shard": "none"},
    "DDP, parts": {"shard": "none", "accumulate": 2},
}.items():
    losses, own = on_ranks(ranks, **flags)
    if ranks.rank == 0:
        difference = max((own[key] - weights[key]).abs().max().item() for key in weights)
        found[name] = [max(abs(a - b) for a, b in zip(losses, expected, strict=True)), difference]
if ranks.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()

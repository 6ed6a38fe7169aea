"""Run by test_own_scripts.py as two ranks: rank 0 prints, as JSON, what scripts of "In your own script" do together.

Each script trains on three batches per rank, with SGD, beginning with the same weights; `plain.py`, which knows nothing
of ranks, trains on the same samples in steps of the same global batch.
"""

import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

REPOSITORY = Path(sys.argv[1])
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
CPU = torch.device("cpu")
SAMPLES, PER_RANK, VAL_SAMPLES = 24, 4, 13


def load(lesson: str, name: str) -> types.ModuleType:
    """Import a script of a lesson."""
    folder = str(REPOSITORY / lesson / "own_script")
    sys.path.insert(0, folder)
    try:
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model: nn.Module) -> torch.Tensor:
    grads = [weight.grad for weight in model.parameters()]
    return flat([grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads])


def weights(model: nn.Module) -> torch.Tensor:
    return flat([w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.parameters()])


def on_all_ranks(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Facts:
    """What the ranks find, and what they need for it."""

    def __init__(self) -> None:
        self.ddp = load("03_ddp", "step1_ddp")
        self.accumulate = load("03_ddp", "step2_accumulate")
        self.shard = load("05_fully_sharded", "step1_shard")
        self.memory = load("05_fully_sharded", "step2_memory")
        self.plain = load("03_ddp", "plain")
        self.rank, self.world_size, _ = self.ddp.join_ranks()
        dataset = self.ddp.Stripes
        self.train_set, self.val_set = dataset(SAMPLES, 0), dataset(VAL_SAMPLES, 1_000_000)
        self.val_part = Subset(self.val_set, range(self.rank, VAL_SAMPLES, self.world_size))
        self.expected = self.train_alone(PER_RANK * self.world_size)

    def network(self) -> nn.Module:
        torch.manual_seed(1)
        model = self.ddp.Net(channels=8, depth=2)
        with torch.no_grad():
            model.head.weight *= 20  # large gradients, so that they are clipped
        return model

    def network_of_rank(self) -> nn.Module:
        """Rank 0's are the weights of `network`, others have other ones."""
        model = self.network()
        with torch.no_grad():
            model.head.weight += self.rank
        return model

    def loader(self, rank: int, world_size: int, batch_size: int) -> DataLoader:
        sampler = DistributedSampler(self.train_set, world_size, rank, shuffle=True, seed=1, drop_last=True)
        sampler.set_epoch(1)
        return DataLoader(self.train_set, batch_size, sampler=sampler)

    def train_alone(self, batch_size: int) -> dict:
        """Return what plain.py does with the global batches."""
        model = self.network()
        loss = self.plain.train_one_epoch(model, self.loader(0, 1, batch_size), sgd(model), CPU)
        accuracy = self.plain.evaluate(model, DataLoader(self.val_set, 5), CPU)
        return {"loss": loss, "accuracy": accuracy, "gradients": gradients(model), "weights": weights(model)}

    def against_alone(self, model: nn.Module, loss: float, evaluate: Callable[[], float]) -> dict:
        """Return by how much what the ranks have trained differs from what one process has trained."""
        grads = None  # accumulation has set them to zero
        if all(weight.grad is not None for weight in model.parameters()):
            grads = (gradients(model) - self.expected["gradients"]).abs().max().item()
        own = weights(model)
        return {
            "loss": abs(loss - self.expected["loss"]),
            "gradients": grads,
            "weights": (own - self.expected["weights"]).abs().max().item(),
            "same on all ranks": len({tuple(other.tolist()) for other in on_all_ranks(own)}) == 1,
            "accuracy": abs(evaluate() - self.expected["accuracy"]),
        }

    def train_ddp(self, train: Callable[..., float], batch_size: int, *arguments: object) -> tuple[dict, int]:
        """Return the differences for one epoch with DDP, and the number of all-reduces of gradients."""
        model = self.network()
        ddp_model = DistributedDataParallel(model)
        calls = [0]

        def count(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            calls[0] += 1
            work = dist.all_reduce(bucket.buffer().div_(self.world_size), async_op=True).get_future()
            return work.then(lambda future: future.value()[0])

        ddp_model.register_comm_hook(None, count)
        loss = train(ddp_model, self.loader(self.rank, self.world_size, batch_size), sgd(model), CPU, *arguments)
        validation = DataLoader(self.val_part, 5)
        return self.against_alone(model, loss, lambda: self.ddp.evaluate(model, validation, CPU)), calls[0]

    def train_sharded(self, script: types.ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        loss = script.train_one_epoch(model, self.loader(self.rank, self.world_size, PER_RANK), optimizer, CPU)
        sampler = DistributedSampler(self.val_set, self.world_size, self.rank, shuffle=False)
        validation = DataLoader(self.val_set, 5, sampler=sampler)
        return self.against_alone(model, loss, lambda: script.evaluate(model, validation, len(self.val_part), CPU))

    def build(self, **options: bool) -> nn.Module:
        """Return the model of step 2 with the weights of `network`, although the ranks have other seeds."""
        self.memory.Net = self.network_of_rank
        return self.memory.build_sharded(self.rank, self.world_size, CPU, **options)

    def all(self) -> dict:
        found: dict = {"norm": self.expected["gradients"].norm().item()}
        found["ddp"], _ = self.train_ddp(self.ddp.train_one_epoch, PER_RANK)
        accumulate = self.accumulate.train_one_epoch
        found["accumulate"], found["all-reduces"] = self.train_ddp(accumulate, PER_RANK // 2, 2)
        original, DistributedDataParallel.no_sync = DistributedDataParallel.no_sync, self.accumulate.nullcontext
        found["forgotten no_sync"], found["all-reduces without no_sync"] = self.train_ddp(accumulate, PER_RANK // 2, 2)
        DistributedDataParallel.no_sync = original
        self.expected, before = self.train_alone(2 * PER_RANK * self.world_size), self.expected  # one batch and a half
        found["remainder"], found["all-reduces with remainder"] = self.train_ddp(accumulate, PER_RANK // 2, 4)
        self.expected = before

        sharded = self.shard.shard(self.network(), self.world_size, CPU)
        found["parts"] = [list(weight.to_local().shape) for weight in sharded.parameters()][:2]
        found["shard"] = self.train_sharded(self.shard, sharded, sgd(sharded))
        for name, options in {"meta": {}, "recompute": {"recompute": True}, "bf16": {"bf16": True}}.items():
            model = self.build(**{"bf16": False, "recompute": False} | options)
            found[name] = self.train_sharded(self.memory, model, sgd(model))

        model = self.network()
        early = sgd(model)
        before = weights(model)
        sharded = self.shard.shard(model, self.world_size, CPU)
        self.train_sharded(self.shard, sharded, early)
        found["change by an optimizer that is too early"] = (weights(sharded) - before).abs().max().item()

        sharded = self.shard.shard(self.network_of_rank(), self.world_size, CPU)
        mixed = get_model_state_dict(sharded, options=WHOLE)
        if self.rank == 0:
            found["unequal seeds"] = (mixed["head.weight"] - self.network().head.weight).mean(dim=1).tolist()
        return found


if __name__ == "__main__":
    facts = Facts()
    found = facts.all()
    if facts.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()

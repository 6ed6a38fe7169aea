"""A small language model on two ranks; words of the first argument choose what is wrong, or what else it is."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

words = sys.argv[1].split(",") if len(sys.argv) > 1 else []
LENGTH, WORDS, WIDTH = 16, 30, 32


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal and mask is None)
        return x + self.out(y.transpose(1, 2).flatten(2)).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(True), Block("future" not in words)])
        self.head = nn.Linear(WIDTH, WORDS)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(tokens.shape[1]) if position_ids is None else position_ids
        mask = None
        if position_ids is not None:
            documents = (position_ids == 0).cumsum(1)
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).tril()[None, None]
            if "documents" not in words:
                mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        x = self.drop(self.words(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = Model().cuda()
    if "fsdp" in words:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        text = torch.randint(WORDS, (4, LENGTH + 1)).cuda()
        places = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(4, -1) if "packed" in words else None
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(text[:, :-1], places)  # LINE call
            loss = F.cross_entropy(outputs.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

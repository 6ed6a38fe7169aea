"""Train a small transformer on random bytes: an example for the reports of nullgpu.

    nullgpu --report python docs/example.py
    nullgpu --clock a100 python docs/example.py

It runs on a GPU, but wastes time in two places, which the reports name.
"""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCH, LENGTH, WIDTH = 30, 32, 512, 512
blocks = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True) for _ in range(8)]
model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 3e-4)

for step in range(STEPS):
    text = torch.randint(256, (BATCH, LENGTH + 1))
    inputs, targets = text[:, :-1].cuda(), text[:, 1:].cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

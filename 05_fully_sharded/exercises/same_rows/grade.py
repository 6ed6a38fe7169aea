"""No part of a weight is drawn twice, the scale of the numbers is as before, and the seed decides what they are."""

from collections.abc import Iterator
from itertools import combinations

import torch

from clinic.observe import Fault, Observed, Script
from clinic.sharded import note_steps
from workshop.models.vit import build_vit

PATCH, WIDTH, DEPTH = 7, 32, 2
FLAGS = ("--optimizer", "sgd", "--batch_size", 8, "--vit_patch", PATCH, "--vit_width", WIDTH, "--vit_depth", DEPTH)
ALIKE = 0.95
"""correlation of two rows of at least 32 numbers that were not drawn independently; by chance none comes near it"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    two_nodes = initial_weights(script, ranks=4, local_ranks=(0, 1, 0, 1))
    one_node, again = (initial_weights(script, ranks=2) for _ in range(2))
    for where, weights in (("2 ranks", one_node), ("4 ranks on 2 nodes", two_nodes)):
        found = list(drawn_twice(weights)) or list(other_scale(weights))
        yield from (f"with {where}, {line}" for line in found[:1])
        if found:
            return
    if changed := [name for name, weight in one_node.items() if not torch.equal(weight, again[name])]:
        yield f"two runs with the same seed begin with different weights: {changed[0]} is one of {len(changed)}"
        return
    other_seed = initial_weights(script, "--seed", 7, ranks=2)
    for name, weight in one_node.items():
        if is_random(name) and (still := (weight == other_seed[name]).float().mean().item()) > 0.1:
            yield f"with another --seed, {still:.0%} of the numbers in {name} are the same as before"
            return


def initial_weights(script: Script, *flags: object, ranks: int, local_ranks: tuple[int, ...] | None = None) -> dict:
    """Return the whole weights that training begins with, by their names."""
    run: Observed = script.run(
        *FLAGS,
        *flags,
        ranks=ranks,
        local_ranks=local_ranks,
        train=8 * ranks,
        val=8,
        notes=False,
        watch=note_steps,
    )
    states = [rank.extra.steps[0].random_state for rank in run.ranks]
    if any(torch.equal(a, b) for a, b in combinations(states, 2)):
        raise Fault(
            "when training begins, two ranks would draw the same random numbers: dropout would be equal on both"
        )
    parts = [rank.extra.steps[0].weights for rank in run.ranks]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: weight[: len(reference()[name])] for name, weight in whole.items()}


def reference() -> dict[str, torch.Tensor]:
    """Return the weights of the lesson's model, as PyTorch draws them on one device."""
    return dict(build_vit("mnist", 28, PATCH, WIDTH, DEPTH).named_parameters())


def is_random(name: str) -> bool:
    """Return whether a weight begins with random numbers: those of LayerNorm are all one or zero."""
    return reference()[name].unique().numel() > 1


def drawn_twice(weights: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield a line for the first weight with numbers, or rows, that are not independent of those before them."""
    rows_before: dict[int, torch.Tensor] = {}
    for name, weight in weights.items():
        if not is_random(name):
            continue
        if (distinct := weight.unique().numel()) < 0.9 * weight.numel():
            yield f"{name} begins with only {distinct} different numbers in {weight.numel()} places"
            return
        rows = weight.flatten(1) if weight.dim() > 1 else weight[None]
        if weight.dim() == 3:  # positions: (1, patches, width)
            rows = weight[0]
        if (length := rows.shape[1]) < WIDTH:
            continue
        rows = torch.nn.functional.normalize(rows - rows.mean(dim=1, keepdim=True), dim=1)
        before = rows_before.get(length, rows[:0])
        everything = torch.cat([before, rows])
        similar = (rows @ everything.T).tril(len(before) - 1).abs().amax(dim=1) > ALIKE
        if similar.any():
            yield f"{int(similar.sum())} of {len(rows)} rows of {name} begin as copies, or nearly, of other rows"
            return
        rows_before[length] = everything


def other_scale(weights: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield a line for each weight with clearly larger or smaller numbers than PyTorch draws, on all or on one rank."""
    for name, expected in reference().items():
        for part, part_expected in zip(weights[name].chunk(2), expected.chunk(2), strict=True):
            scale, usual = part.square().mean().sqrt().item(), part_expected.square().mean().sqrt().item()
            enough = part.numel() >= 64 or not is_random(name)
            if enough and abs(scale - usual) > (0.35 if is_random(name) else 1e-6) * max(usual, 1e-3):
                yield f"the numbers of {name} begin with a size of {scale:.3g} (root mean square), not of {usual:.3g}"
                return

"""Gradients that reach the outputs of a model."""

import torch


def from_outside(outputs: list[torch.Tensor], gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what reached each output from outside of the model, without what came through its other outputs.

    A model may return its loss beside the scores that the loss is made of.
    """
    made = {number: outputs[number].grad_fn for number in gradients}
    order = sorted(
        gradients, key=lambda number: -1 if made[number] is None else made[number]._sequence_nr(), reverse=True
    )
    found: dict[int, torch.Tensor] = {}
    for number in order:  # the one that was made last first
        inner = None
        if found:
            later = [outputs[k] for k in found]
            (inner,) = torch.autograd.grad(
                later, [outputs[number]], list(found.values()), retain_graph=True, allow_unused=True
            )
        found[number] = gradients[number] if inner is None else gradients[number] - inner
    return found

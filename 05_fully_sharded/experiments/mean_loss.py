"""The loss of experiments whose sequences are all full: the mean over all tokens."""

import torch
import torch.nn.functional as F


def mean_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy () over the tokens of (N, T), from scores (N, T, vocabulary)."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

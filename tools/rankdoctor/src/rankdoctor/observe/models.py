"""The models of this process, and what is known of them since their last update."""

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Models:
    """The models of this process, and what happened since the last update of their weights."""

    numbers: dict[int, int] = field(default_factory=dict)
    """of the models, by their ids"""
    known: list[nn.Module] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """of parameters, by their ids"""
    inside: dict[int, str] = field(default_factory=dict)
    """lines where a DistributedDataParallel was made, by the ids of the modules in it"""
    calls: int = 0
    awaited: "weakref.WeakValueDictionary[int, torch.Tensor]" = field(default_factory=weakref.WeakValueDictionary)
    """inputs that need gradients and are no weights, by the addresses of their values"""
    lengths: set[int] = field(default_factory=set)
    """of the inputs of the last call with gradients: one of them is the number of samples"""
    random_layers: int = 0
    """calls of dropout or batch norm in training mode, in the present call of a model"""
    random_in: dict[tuple[str, str], None] = field(default_factory=dict)
    """what they are, and their lines; also lines that draw noise"""
    noise: dict[int, str] = field(default_factory=dict)
    """lines that drew normal noise in this call, by the address of its values"""
    others: tuple[object, ...] = ()
    """states of the generators of Python and NumPy before a call in evaluation mode"""
    looked_for_sampling: int = 0
    sampling: set[str] = field(default_factory=set)
    """lines that draw noise which the model scales by a value that it has learned, as a VAE does"""
    dropout_noted: bool = False
    damaged: bool = False
    """whether a NaN was made"""
    evaluated: int = -1
    """update in which a model was evaluated first; -1: none was"""
    backwards: list[str] = field(default_factory=list)
    """lines of the backward passes since the last update"""
    losses: list[float] = field(default_factory=list)
    of_terms: list[bool] = field(default_factory=list)
    """of the backward passes since the last update: whether the loss adds up several"""
    """what was minimized in these passes"""
    zeroed: set[int] = field(default_factory=set)
    """optimizers of which the gradients were zero before a backward pass since their last update"""
    added: set[int] = field(default_factory=set)
    """optimizers to whose old gradients a backward pass has added since their last update"""
    norms: dict[int, float] = field(default_factory=dict)
    """norm of the gradients of each optimizer after backward, as `gradient_norm` says"""
    sizes: dict[int, float] = field(default_factory=dict)
    """of each optimizer: the size of its first gradients after the last backward pass"""
    sharded: dict[int, torch.Tensor] = field(default_factory=dict)
    """sharded parameters that got gradients in the first backward passes, by their ids"""
    for_inputs: bool = False
    """whether the script wants the gradient of an input, since the last backward pass"""
    factors: list[tuple[str, int, float, int]] = field(default_factory=list)
    """of each loss since the last update: its line, its samples, and how much a sample counts"""
    elements: list[tuple[str, int, int, float]] = field(default_factory=list)
    """of each sum or mean that was minimized since then: the line of its backward pass, which one of that pass it is,
    its elements (0: not known), and how much one of them counts"""
    graphs: list[tuple["weakref.ref[Alive]", str]] = field(default_factory=list)


models = Models()


class Alive:
    """Lives as long as the graph that it is attached to."""

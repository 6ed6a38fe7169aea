"""Lesson 01: train a small CNN to read handwritten digits, with one process on one device.

    python train.py              # trains
    kernprof -lv train.py        # trains, then shows the time spent on each line of train_one_epoch

You should see the loss fall, the accuracy on digits never trained on pass 98 % after one epoch of the whole data set,
and, in the line profile, which line the time goes to.
"""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from workshop.commandline import run_with_config
from workshop.config import TrainConfig
from workshop.hardware import pick_device
from workshop.loaders import Loader, build_loaders
from workshop.models import build_model
from workshop.profiling import annotate, profile
from workshop.run import Run
from workshop.step.optimizers import build_optimizer


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """The flags of this lesson, beside those that all lessons share."""

    lr_decay: float = 0.7
    """factor on the learning rate after each epoch"""


@profile
def train_one_epoch(
    config: Config, model: nn.Module, loader: Loader, optimizer: Optimizer, device: torch.device, run: Run
) -> float:
    """Show every training sample to the model once; return the mean loss."""
    model.train()
    loss_sum = run.loss_sum()  # zero, unless this run was stopped in the middle of this epoch and now goes on there
    for inputs, targets in run.watch(loader):
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        optimizer.zero_grad()
        with annotate("forward"):  # a name for this part of the step, shown by profilers
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
        with annotate("backward"):
            loss.backward()
        with annotate("optimizer"):
            optimizer.step()
        loss_sum += loss.detach() * len(targets)  # added up on the device, which the CPU does not have to wait for
        run.end_step(loss)  # every --log_interval steps it prints the loss: there the CPU waits for the device
    return loss_sum.item() / loader.sampler.samples


@torch.inference_mode()
def evaluate(config: Config, model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the share of right answers over the validation samples."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=config.non_blocking)
        targets = targets.to(device, non_blocking=config.non_blocking)
        outputs = model(inputs)
        loss_sum += F.cross_entropy(outputs, targets, reduction="sum")
        correct += (outputs.argmax(dim=1) == targets).sum()
    return loss_sum.item() / loader.sampler.samples, correct.item() / loader.sampler.samples


def main(config: Config) -> None:
    """Train for ``config.epochs`` epochs, validating and saving a checkpoint after each."""
    device = pick_device()
    torch.manual_seed(config.seed)
    train_loader, val_loader = build_loaders(config, device)
    model = build_model(config).to(device)
    optimizer = build_optimizer(config, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=config.lr_decay)

    with Run(config, device) as run:
        if config.benchmark:
            run.benchmark(train_loader, lambda loader: train_one_epoch(config, model, loader, optimizer, device, run))
            return
        first_epoch = run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in range(first_epoch, config.epochs + 1):
            train_loader.sampler.set_epoch(epoch)  # a new order of the samples
            started = time.perf_counter()
            train_loss = train_one_epoch(config, model, train_loader, optimizer, device, run)
            seconds = time.perf_counter() - started
            val_loss, val_accuracy = evaluate(config, model, val_loader, device)
            run.log_epoch(epoch, seconds, scheduler.get_last_lr()[0], train_loss, val_loss, val_accuracy)
            scheduler.step()
            run.save()


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)

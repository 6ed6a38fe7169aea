"""Lesson 04's optimizers, and their state in a resumed run whose options differ from those of the run that saved it."""

from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY
from lab.launching import load_script
from workshop.run.checkpoint import fingerprint, save_checkpoint
from workshop.run.position import Position

CPU = torch.device("cpu")
LESSON = load_script(REPOSITORY / "04_mixed_precision")
Config, make_optimizer = LESSON.Config, LESSON.make_optimizer


def test_a_resumed_run_continues_with_the_tensor_that_a_graph_reads(tmp_path: Path) -> None:
    """The checkpoint has half of its run's --lr, which was 1; this run asks for a quarter of that --lr."""
    config = Config(lr=0.25, cuda_graph=True, resume=True)
    optimizer = make_optimizer(config, torch.nn.Linear(2, 2))
    (group,) = optimizer.param_groups
    lr = group["lr"]
    parts = {"optimizer": optimizer.state_dict()}
    run = {
        "is": fingerprint(config, 1, config.batch_size, parts),
        "size": {},
        "lr": 1.0,
        "epochs": [],
        "finished_epochs": 1,
        "steps": 0,
        "step": 0,
        "ranks": [],
    }
    saved = {"state": {}, "param_groups": [dict(group, params=[0, 1], lr=torch.tensor(0.5))]}
    save_checkpoint(tmp_path / "checkpoint.pt", {"optimizer": saved, "run": run})
    position = Position(config, CPU, 0, 1, tmp_path / "checkpoint.pt", print)
    checkpoint = position.load(matching=parts)
    LESSON.load_optimizer(optimizer, checkpoint["optimizer"])
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.125


def test_a_first_step_that_overflows_leaves_no_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, torch.nan))  # what was in memory
    found = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = make_optimizer(Config(optimizer="sgd", lr=0.5, fused=fused), torch.nn.ParameterList([weight]))
        scaler = torch.amp.GradScaler("cpu")
        for factor in (torch.inf, 0.125, 0.25):
            optimizer.zero_grad()
            scaler.scale((factor * weight).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_momentum_that_a_checkpoint_lacks_is_zero() -> None:
    """As after a run in which all steps have overflowed."""
    model = torch.nn.Linear(2, 2)
    saved = make_optimizer(Config(optimizer="sgd"), model).state_dict()
    optimizer = make_optimizer(Config(optimizer="sgd", fused=True), model)
    LESSON.load_optimizer(optimizer, saved)
    for weights in model.parameters():
        assert torch.equal(optimizer.state[weights]["momentum_buffer"], torch.zeros_like(weights))

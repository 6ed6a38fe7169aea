"""Evaluate a checkpoint of the train.py beside this script, while its training goes on.

    torchrun --standalone --nproc-per-node 1 validate.py CHECKPOINT --data_dir ...

CHECKPOINT is a folder such as checkpoints/epoch0002_step0000000 of a run. Copy it first, because a run keeps only its
newest two. It holds the flags of its training, but not those that may change when a run is resumed: without
--limit_val, all validation tokens count. Flags that you give here win, but the model must be the same. Any number of
ranks will do on which the model fits.
"""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import train
from workshop.config import load_config
from workshop.errors import UserError, run_reporting_user_errors

MODEL = ("model", "width", "depth", "vocabulary")
"""flags that the weights depend on"""


def flags_of(checkpoint: str) -> dict[str, str]:
    """Return the flags of the training that has saved a checkpoint, apart from those that may change on resume."""
    saved = {"settings": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is loaded by a single process
        dcp.load(saved, checkpoint_id=checkpoint, no_dist=True)
    return {name: value for name, value in json.loads(saved["settings"]).items() if value != "None"}


def main() -> None:
    """Load the weights into a model that is shared as in the training, and print the loss of the validation tokens."""
    if len(sys.argv) < 2 or not Path(sys.argv[1], ".metadata").is_file():
        raise UserError(f"the first argument must be the folder of a checkpoint, got {sys.argv[1:2]}")
    checkpoint, *flags = sys.argv[1:]
    trained = flags_of(checkpoint)
    config = load_config(train.Config, [*(word for name in trained for word in (f"--{name}", trained[name])), *flags])
    for name in MODEL:
        if str(getattr(config, name)) != trained.get(name, "None"):
            raise UserError(f"{checkpoint} was trained with --{name} {trained.get(name)}: leave out --{name}")
    ranks = train.join_ranks(config.timeout_minutes)
    config = replace(config, precision=train.choose_precision(config.precision, ranks.device))
    model = train.distribute_model(config, ranks)
    state = {"model": train.get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=checkpoint)
    train.set_model_state_dict(model, state["model"])
    training = SimpleNamespace(model=model, ranks=ranks, sum_of_losses=train.sum_of_losses)
    loader = train.make_loader(config, "val", ranks)
    loss, _ = train.evaluate(config, training, loader)
    if ranks.rank == 0:
        of = f"{len(loader.dataset):,} sequences of {config.sequence_length:,} tokens"
        print(f"{checkpoint}: validation loss {loss:.6f} of {of} (--limit_val)")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_reporting_user_errors(main)

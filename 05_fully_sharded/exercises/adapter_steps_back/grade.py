"""The file has the whole adapter and nothing else, as plain tensors, and any number of ranks goes on with it."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten

import torch
from torch.distributed.tensor import DTensor

from clinic.coded import SEQUENCE_LENGTH
from clinic.runs import Fault, Observed, Script

STEPS = 2
"""of an epoch"""
FLAGS = (
    *("--optimizer", "sgd", "--lr", 1.0, "--warmup", 0, "--global_batch_size", 12, "--epochs", 2),
    *("--width", 64, "--depth", 1, "--sequence_length", SEQUENCE_LENGTH),
)
DATA = {"train": 12 * STEPS, "val": 12, "keep": True}
Weights = dict[str, torch.Tensor]


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = script.run(*FLAGS, ranks=2, **DATA, watch=note_writing, stop_after=STEPS + 1)  # in the second epoch
    first, trained = whole_weights(run, 0), whole_weights(run, STEPS)
    if wrong := wrong_file(run, {name: w for name, w in trained.items() if not torch.equal(w, first[name])}):
        yield wrong
    for ranks in (2, 1, 3):
        where = f"a run of 2 ranks that is resumed with {ranks}"
        folder = Path(tempfile.mkdtemp(dir=script.folder))
        shutil.copytree(run.run_dir, folder, dirs_exist_ok=True)
        try:
            resumed = script.run(*FLAGS, "--resume", "true", ranks=ranks, **DATA, run_dir=folder)
        except Fault as fault:
            yield f"{where} fails: {fault}"
            return
        if (steps := len(resumed[0].training)) != STEPS:
            yield f"{where} takes {steps} steps in its second epoch, which has {STEPS}"
            return
        found = whole_weights(resumed, 0)
        if other := [name for name in trained if not torch.equal(found[name], trained[name])]:
            total, same = trained[other[0]].numel(), int((found[other[0]] == trained[other[0]]).sum())
            yield f"{where} begins with another {other[0]}: {total - same:,} of its {total:,} numbers differ"
            return


def wrong_file(run: Observed, adapter: Weights) -> str | None:
    """Return what is wrong with the file of the first epoch; ``adapter`` has the weights that were trained."""
    files = list(run.run_dir.glob("checkpoints/*/adapter.pt"))
    if len(files) != 1:
        return f"after the first of two epochs, there are {len(files)} files adapter.pt in the folder of checkpoints"
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # it warns about DTensors in a file
    try:
        found = torch.load(files[0])
    except Exception as error:
        return f"torch.load cannot read adapter.pt: {shorten(str(error), 200, placeholder=' ...')}"
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        return "adapter.pt must have a dictionary of names and tensors"
    if sharded := sum(isinstance(value, DTensor) for value in found.values()):
        return f"{sharded} of {len(found)} tensors in adapter.pt are DTensors, which belong to a group of ranks"
    if missing := adapter.keys() - found.keys():
        return f"{len(missing)} of {len(adapter)} weights of the adapter are not in adapter.pt: {min(missing)}"
    if more := found.keys() - adapter.keys():
        return f"adapter.pt also has {len(more)} tensors that are no trained weights: {min(more)}"
    for name, weight in adapter.items():
        shapes = tuple(found[name].shape), tuple(weight.shape)
        if shapes[0] != shapes[1]:
            return f"{name} has the shape {shapes[0]} in adapter.pt, and {shapes[1]} in the model"
        if not torch.equal(found[name].float(), weight):
            right = int((found[name] == weight).sum())
            return f"{right:,} of {weight.numel():,} numbers of {name} in adapter.pt are those at the end of the epoch"
    writers = [str(number) for number, rank in enumerate(run.ranks) if rank.extra]
    return f"ranks {' and '.join(writers)} write the same file" if len(writers) > 1 else None


def whole_weights(run: Observed, step: int) -> Weights:
    """Return the weights before a step of a run, put together from the shards of its ranks."""
    parts = [rank.training[step].weights for rank in run.ranks]
    return {name: torch.cat(of_ranks) for name, *of_ranks in zip(run[0].weights, *parts, strict=True)}


def note_writing(_: Path) -> Callable[[], bool]:
    """Note whether this rank writes a file of the adapter; see `Script.run`."""
    own_save = torch.save
    written = []

    def save(content: object, file: object, *arguments: object, **keywords: object) -> None:
        written.append(Path(str(getattr(file, "name", file))).name)
        own_save(content, file, *arguments, **keywords)

    torch.save = save
    return lambda: any(name.startswith("adapter") for name in written)

"""With the same number of batches on each rank, and with one more on rank 0, all ranks must call the same collectives.

Each rank logs a collective before it calls it, and waits until the other ranks have logged their next collective too.
So ranks that would wait for each other forever are found at once, however busy the machine is.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from clinic.observe import Fault, Script

RANKS = 2
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for val in (33, 32):
        where = f"with {val} validation samples, two ranks and batches of 16"
        notes = script.folder / f"collectives_{val}"
        notes.mkdir()
        watch = partial(compare_collectives, notes=notes)
        try:
            run = script.run("--batch_size", 16, ranks=RANKS, train=64, val=val, keep=True, watch=watch)
        except Fault:
            if not any(notes.glob("apart_*")):
                raise
        if apart := sorted(notes.glob("apart_*")):
            yield f"{where}: {apart[0].read_text()}"
            continue
        samples, loss, right = run.validated()
        if len(samples) < val:
            yield f"{where}: {val - len(samples)} of them were seen by no rank"
            continue
        (epoch,) = run.epochs
        count = epoch["val_accuracy"] * val
        if abs(count - right) > 1e-3:
            yield f"{where}: the model got {right} right, but the reported accuracy means {count:.3f}"
        if not math.isclose(epoch["val_loss"], loss, rel_tol=1e-5):
            yield f"{where}: their mean loss is {loss:.5f}, but {epoch['val_loss']:.5f} is reported"


def compare_collectives(script: Path, notes: Path) -> Callable[[], None]:
    """Compare each collective with those of the other ranks; end the ranks if they are not the same."""
    rank = int(os.environ["RANK"])
    count = 0

    def note(kind: str, place: str) -> None:
        nonlocal count
        new = notes / f"new_{rank}"
        new.write_text(json.dumps([kind, place]))
        new.rename(notes / f"{count}_{rank}")
        files = [notes / f"{count}_{other}" for other in range(RANKS)]
        while not all(file.exists() for file in files):
            time.sleep(0.002)
        all_kinds, all_places = zip(*(json.loads(file.read_text()) for file in files), strict=True)
        if len(set(all_kinds)) > 1:
            where = ", ".join(f"rank {other} {place}" for other, place in enumerate(all_places))
            (notes / f"apart_{rank}").write_text(f"the ranks wait in different collectives: {where}")
            os._exit(0)
        count += 1

    def noting(name: str, own: Callable) -> Callable:
        def noted(*arguments: object, **keywords: object) -> Any:  # noqa: ANN401
            caller: FrameType | None = sys._getframe(1)
            is_own = caller is not None and caller.f_code.co_filename == str(script)
            while caller and caller.f_code.co_filename != str(script):  # Run has collectives too
                caller = caller.f_back
            line = f"line {caller.f_lineno} ({caller.f_code.co_name})" if caller else "PyTorch"
            if is_own:
                tensor = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else torch.empty(0)
                note(f"{name} of {tensor.numel()} {tensor.dtype}", f"in {name} in {line}")
            else:
                note("of the workshop", f"in {line}")
            return own(*arguments, **keywords)

        return noted

    for name in COLLECTIVES:
        setattr(dist, name, noting(name, getattr(dist, name)))

    def at_the_end() -> None:
        note("the end", "at the script's end")

    return at_the_end

"""Find ranks that would wait for each other forever, at once and however busy the machine is.

Each rank logs a collective before it calls it, and waits until the other ranks have logged their next collective too.
If these are not the same, the ranks are ended.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip


def compare_collectives(script: Path, notes: Path, ranks: int, backward: bool = False) -> Callable[[], None]:
    """For ``watch`` of `clinic.observe.Script.run`: end the ranks as soon as they are in different collectives.

    Args:
        script: of the learner.
        notes: an empty folder, the same for all ranks.
        ranks: how many.
        backward: a backward pass counts as a collective too, because that of DistributedDataParallel has some.
    """
    rank = int(os.environ["RANK"])
    count = 0

    def note(kind: str, place: str) -> None:
        nonlocal count
        new = notes / f"new_{rank}"
        new.write_text(json.dumps([kind, place]))
        new.rename(notes / f"{count}_{rank}")
        files = [notes / f"{count}_{other}" for other in range(ranks)]
        while not all(file.exists() for file in files):
            time.sleep(0.002)
        all_kinds, all_places = zip(*(json.loads(file.read_text()) for file in files), strict=True)
        if len(set(all_kinds)) > 1:
            names = {kind.split()[0] for kind in all_kinds}
            if len(names) == 1:  # only the tensors differ
                all_places = tuple(f"{place}, {kind}" for kind, place in zip(all_kinds, all_places, strict=True))
            where = "; ".join(f"rank {other} {place}" for other, place in enumerate(all_places))
            (notes / f"apart_{rank}").write_text(f"the ranks wait in different collectives: {where}")
            os._exit(0)
        count += 1

    def noting(name: str, own: Callable) -> Callable:
        def noted(*arguments: object, **keywords: object) -> Any:  # noqa: ANN401
            caller: FrameType | None = sys._getframe(1)
            is_own = name == "backward" or (caller is not None and caller.f_code.co_filename == str(script))
            while caller and caller.f_code.co_filename != str(script):  # Run has collectives too
                caller = caller.f_back
            line = f"line {caller.f_lineno} ({caller.f_code.co_name})" if caller else "PyTorch"
            if name == "backward":
                note(name, f"in backward in {line}")
            elif is_own:
                tensor = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else torch.empty(0)
                note(f"{name} of {tensor.numel()} {tensor.dtype}", f"in {name} in {line}")
            else:
                note("of the workshop", f"in {line}")
            return own(*arguments, **keywords)

        return noted

    for name in NAMES:
        setattr(dist, name, noting(name, getattr(dist, name)))
    if backward:
        torch.autograd.backward = noting("backward", torch.autograd.backward)

    def at_the_end() -> None:
        note("the end", "at the script's end")

    return at_the_end


def apart(notes: Path) -> str | None:
    """Return where the ranks were when they were in different collectives; None if they never were."""
    found = sorted(notes.glob("apart_*"))
    return found[0].read_text() if found else None

"""Run by test_see_sharding.py as two ranks: rank 0 prints, as JSON, what the experiments of lesson 05 measure."""

import json
import sys
from pathlib import Path

import torch

from workshop.paths import REPOSITORY

LESSON = REPOSITORY / "05_fully_sharded"
SMALL = {
    "one_step": ("--vit_width", 64, "--steps", 1),
    "accumulation": ("--vit_width", 64),
    "small_updates": ("--vit_width", 32, "--vit_depth", 2),
    "meta_device": ("--vit_width", 64),
}
"""the experiments and the flags with which they are quick"""


def main() -> None:
    """Measure all of them in one process group."""
    sys.path.insert(0, str(LESSON / "experiments"))
    import accumulation
    import meta_device
    import one_step
    import small_updates
    from lab.process_group import process_group

    torch.set_num_threads(1)
    found = {}
    with process_group() as (rank, world_size, device):
        for module in (one_step, accumulation, small_updates, meta_device):
            name = Path(str(module.__file__)).stem
            sys.argv = [f"{name}.py", *map(str, SMALL[name])]
            found[name] = module.measure(module.parse_arguments(), rank, world_size, device)
        if rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main()

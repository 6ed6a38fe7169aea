"""What can be combined with FSDP2, and in which order? Each combination trains, and is compared with one process.

    torchrun --standalone --nproc-per-node 2 experiments/composition.py                           # minutes
    torchrun --standalone --nproc-per-node 2 experiments/composition.py --quick true              # no code is compiled
    torchrun --standalone --nproc-per-node 2 experiments/composition.py --only clip_grad_norm_    # one group

You should see "equal" for most combinations, and "close" for those that compute in 16 bits. Some fail with an error,
and some train something else without any error. The combinations are in combinations.py, in PyTorch's own calls.
"""

import gc
import logging
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from combination_training import DEPTH, MAX_NORM, Combination, Process
from combinations import COMBINATIONS
from lab.flags import default_folder, make_output_folder
from lab.process_group import process_group
from lab.results import write_results
from lab.tables import format_table
from small_training import about_run, largest_difference, make_model, train_one_process
from workshop.commandline import run_with_config
from workshop.errors import UserError

EQUAL, CLOSE = 1e-5, 1e-2
"""largest differences of the losses from one process that are called equal in 32 bits, and close in 16"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags."""

    quick: bool = False
    """let torch.compile trace the model, but not generate code: it then needs no C++ compiler, and less time"""
    only: str = ""
    """try only the combinations whose group or name contains this text"""
    out: Path = field(default_factory=default_folder)
    """folder for the results, composition_torch_<version>.json"""


def train_alone(max_norm: float | None) -> dict[str, Any]:
    """Return the losses and the weights of one process."""
    model = make_model(DEPTH)
    losses = train_one_process(model, max_norm=max_norm)
    return {"losses": losses, "weights": model.state_dict()}


def try_combination(combination: Combination, process: Process, alone: dict[bool, dict[str, Any]]) -> dict[str, Any]:
    """Train with a combination and return what came of it.

    Args:
        combination: to try.
        process: this one, among the others.
        alone: losses and weights of one process, with and without clipped gradients.
    """
    row: dict[str, Any] = {"group": combination.group, "name": combination.name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = combination.run(process)
    except UserError as error:
        return row | {"status": "refused", "error": str(error)}
    except Exception as error:  # whatever a combination fails with is its result
        return row | {"status": "fails", "error": first_line(error)}
    row["facts"] = outcome.facts
    if outcome.losses is None:
        return row | {"status": "works"}
    expected = alone[combination.clipped]
    difference = max(abs(a - b) for a, b in zip(outcome.losses, expected["losses"], strict=True))
    row["loss_difference"] = difference
    row["weight_difference"] = largest_difference(outcome.weights or {}, expected["weights"])
    if difference <= EQUAL and row["weight_difference"] <= EQUAL:
        return row | {"status": "equal"}
    return row | {"status": "close" if combination.sixteen_bits and difference <= CLOSE else "differs"}


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:240]


def main(config: Config) -> None:
    """Try each combination together with the other ranks; rank 0 prints and writes the results."""
    with process_group() as (rank, world_size, device):
        if world_size != 2:
            raise UserError(
                "this experiment is for two ranks: torchrun --standalone --nproc-per-node 2 experiments/composition.py",
                already_reported=rank > 0,
            )
        chosen = [
            combination for combination in COMBINATIONS if config.only in f"{combination.group}, {combination.name}"
        ]
        if not chosen:
            raise UserError(
                f"--only {config.only}: no combination has this in its group or name", already_reported=rank > 0
            )
        if rank == 0:
            make_output_folder(config.out)
        torch.set_num_threads(1)
        logging.getLogger("torch").setLevel(logging.CRITICAL)  # PyTorch's messages about what fails here on purpose
        process = Process(rank, world_size, device, "eager" if config.quick else "inductor")
        alone = {False: train_alone(None), True: train_alone(MAX_NORM)}
        rows = []
        for combination in chosen:
            rows.append(try_combination(combination, process, alone))
            if rank == 0:
                print(describe(rows[-1]), flush=True)
            torch._dynamo.reset()
            gc.collect()  # FSDP2's modules refer to each other in circles
            dist.barrier()
        if rank == 0:
            file = config.out / f"composition_torch_{torch.__version__.partition('+')[0]}.json"
            about = about_run("composition.py", world_size)
            about |= {"ranks": world_size, "compiler": process.compiler, "equal": EQUAL, "close": CLOSE}
            write_results(file, device, about | {"rows": rows})
            counts = {status: sum(row["status"] == status for row in rows) for status in {r["status"] for r in rows}}
            print("\n" + format_table(["result", "combinations"], [(k, str(n)) for k, n in sorted(counts.items())]))
            print(f"\nwritten: {file}")


def describe(row: dict[str, Any]) -> str:
    """Return one line on a combination."""
    found = row["status"]
    if "loss_difference" in row:
        found += f" (losses {row['loss_difference']:.0e}, weights {row['weight_difference']:.0e})"
    facts = "; ".join(f"{name}: {value}" for name, value in row.get("facts", {}).items())
    return f"{row['group']} | {row['name']}: {found} {row.get('error', '')} {facts}".rstrip()


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)

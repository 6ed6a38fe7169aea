"""Both forms of checkpoint: which ranks can continue from them, what saving costs, and what a damaged one does.

    python experiments/save_and_reshard.py            # two minutes; ranks on CPUs, also where there is a GPU

You should see the same losses on 1, 2 and 4 ranks, from a checkpoint that 2 ranks have written; that rank 0 needs
memory for the whole model only with the form whole; and that a part of which 4,000 bytes have become zero is loaded
without a word by dcp.load, but not by the lesson.
"""

import ctypes
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lab.flags import default_folder, make_output_folder
from lab.launching import free_port, load_script
from lab.results import write_results
from lab.tables import format_seconds, format_table
from workshop.commandline import run_with_config
from workshop.config import require_positive
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.run import Run

lesson = load_script(Path(__file__).resolve().parent.parent)

SAVED_BY = 2
RESUMED_BY = (1, 2, 4)
FORMS = ("whole", "sharded")
WAYS = {"whole": ("whole", False), "sharded": ("sharded", False), "sharded, async": ("sharded", True)}
LATEST = {"whole": "checkpoint.pt", "sharded": "checkpoint.sharded"}
BEFORE = {"whole": "checkpoint.previous.pt", "sharded": "checkpoint.previous.sharded"}
ZEROED = 4000
"""bytes"""


@dataclass(frozen=True, kw_only=True)
class ReshardConfig(lesson.Config):  # type: ignore[misc, name-defined]
    """The flags of the lesson, some with smaller numbers, and those of the measurement."""

    limit_train: int | None = 256
    """train on this many samples only"""
    limit_val: int | None = 64
    """validate on this many samples only"""
    global_batch_size: int | None = 32
    """samples per step over all ranks"""
    epochs: int = 2
    """passes over the training data; the ranks continue from the checkpoint before the last one"""
    num_workers: int = 0
    """processes that prepare batches"""
    loader: str = "memory"  # type: ignore[assignment]
    """how samples reach the training loop"""
    width_for_costs: int = 384
    """--vit_width of the model whose checkpoints are measured: a larger one, so that its state can be seen in memory"""
    depth_for_costs: int = 6
    """--vit_depth of that model"""
    trials: int = 3
    """how often each way of saving is measured"""
    out: Path = field(default_factory=default_folder)
    """folder for save_and_reshard.json"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "width_for_costs", "depth_for_costs", "trials")
        if self.epochs < 2:
            raise UserError("--epochs must be at least 2: the ranks continue from the checkpoint before the last one")


def in_ranks(count: int, work: Callable[..., object], *arguments: object) -> tuple[list[str], Any]:
    """Call ``work`` in ``count`` processes with the variables of a launcher; return error lines and a result.

    The processes are forks of this one, which has imported torch: that is quick, and works as long as neither threads
    nor devices are in use here. The result is what the call returned on rank 0; None if it failed.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}

    def be(rank: int, log: Path) -> None:
        os.environ |= common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        torch.set_num_threads(1)

        def work_and_send() -> None:
            result = work(*arguments)
            if rank == 0:
                sender.send(result)

        run_reporting_user_errors(work_and_send)

    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(count)]
        processes = [fork.Process(target=be, args=(rank, logs[rank])) for rank in range(count)]
        for process in processes:
            process.start()
        sender.close()
        result = None
        with suppress(EOFError):
            result = receiver.recv()
        for process in processes:
            process.join()
        written = [line for log in logs for line in log.read_text().splitlines()]
    errors = [line for line in written if line.startswith("error: ")]
    if not errors and any(process.exitcode for process in processes):
        errors = written[-1:] or [f"exit status {[process.exitcode for process in processes]}"]
    return errors, result


def or_stop(errors: list[str], result: Any) -> Any:  # noqa: ANN401
    """Return the result; raise `UserError` if a rank has failed."""
    if errors:
        raise UserError(errors[0].removeprefix("error: "))
    return result


def train(config: Any) -> list[tuple[float, float]]:  # noqa: ANN401
    """Run the lesson as a rank; return the train and validation loss of each epoch, which are the same on all ranks."""
    lesson.main(config)
    summary = json.loads((config.run_dir / "summary.json").read_text()) if os.environ["RANK"] == "0" else {"epochs": []}
    return [(epoch["train_loss"], epoch["val_loss"]) for epoch in summary["epochs"]]


def without_last_save(run_dir: Path, form: str, copy: Path) -> Path:
    """Copy a run's folder as it was before its last checkpoint."""
    shutil.copytree(run_dir, copy)
    latest = copy / LATEST[form]
    shutil.rmtree(latest) if latest.is_dir() else latest.unlink()
    (copy / BEFORE[form]).rename(latest)
    (copy / "summary.json").unlink()  # so that what is read from there is what the next run has written
    return copy


def reshard(config: Any, folder: Path) -> list[dict[str, Any]]:  # noqa: ANN401
    """Train with two ranks; continue from one of its checkpoints with others; return the losses of what they trained.

    The first row of each form is the run that was not stopped.
    """
    rows = []
    for form in FORMS:
        saved = replace(config, checkpoint_form=form, run_dir=folder / form)
        whole_run = or_stop(*in_ranks(SAVED_BY, train, saved))
        rows.append({"form": form, "resumed_by": None, "losses": whole_run[-1], "difference": 0.0})
        for ranks in RESUMED_BY:
            run_dir = without_last_save(folder / form, form, folder / f"{form}{ranks}")
            losses = or_stop(*in_ranks(ranks, train, replace(saved, resume=True, run_dir=run_dir)))
            difference = max(abs(a - b) for a, b in zip(losses[-1], whole_run[-1], strict=True))
            rows.append({"form": form, "resumed_by": ranks, "losses": losses[-1], "difference": difference})
    return rows


def file_sizes(run_dir: Path, form: str) -> dict[str, int]:
    """Return the bytes of each file of the latest checkpoint."""
    path = run_dir / LATEST[form]
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {str(file.relative_to(run_dir)): file.stat().st_size for file in files}


def status_bytes(name: str) -> int:
    """Return an entry of /proc/self/status, such as VmRSS, the memory in use, and VmHWM, the most there has been."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure_saves(config: Any, folder: Path) -> dict[str, Any]:  # noqa: ANN401
    """Save a larger model as a rank, in each way in turn; return seconds, and the memory that rank 0 needed for it."""
    with suppress(AttributeError, OSError):  # glibc: give freed memory back at once, so that only what is in use counts
        ctypes.CDLL(None).mallopt(-3, 1 << 16)
        ctypes.CDLL(None).mallopt(-1, 1 << 16)
    rank, _, world_size = lesson.ranks_from_env()
    device = torch.device("cpu")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    config = replace(config, batch_size=lesson.batch_size_per_rank(config, world_size))
    config = replace(config, vit_width=config.width_for_costs, vit_depth=config.depth_for_costs)
    torch.manual_seed(config.seed)
    loader = lesson.make_loader(config, "train", device, rank, world_size)
    model = lesson.shard_model(config, rank, device, world_size)
    optimizer = lesson.make_optimizer(config, model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    lesson.train_step(config, model, optimizer, scaler, *next(iter(loader)))  # so that the optimizer has a state
    parts = lesson.sharded_state(model, optimizer)
    tensors = [*parts["model"].values()]
    tensors += [t for of_one in parts["optimizer"]["state"].values() for t in of_one.values() if torch.is_tensor(t)]
    own = sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)
    facts = {"state_bytes": sum(t.numel() * t.element_size() for t in tensors), "part_bytes": own}
    facts["parameters"] = sum(weight.numel() for weight in model.parameters())
    del parts, tensors

    figures: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for trial in range(config.trials + 1):  # the first one warms up
        for way, (form, async_save) in WAYS.items():
            run_dir = folder / f"costs of {way}"
            own_config = replace(config, checkpoint_form=form, async_save=async_save, run_dir=run_dir)
            with Run(own_config, device, rank, world_size) as run:
                run.position.begin_epoch(loader)
                dist.barrier()
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
                before, started = status_bytes("VmRSS"), time.perf_counter()
                lesson.save_checkpoint(own_config, model, optimizer, scheduler, scaler, run, torch.zeros(()))
                returned = time.perf_counter() - started
                run.position.wait_for_save(None)
                complete = time.perf_counter() - started
                memory = status_bytes("VmHWM") - before
            if trial:
                figures[way].append({"memory_bytes": memory, "returned": returned, "complete": complete})
    dist.destroy_process_group()
    return facts | {"saves": figures}


def largest_part(folder: Path) -> tuple[Path, int]:
    """Return the file of rank 1 in a sharded checkpoint, and where in it the middle of its largest tensor is."""
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    largest = max((part for part in stored if part.relative_path.startswith("__1_")), key=lambda part: part.length)
    return folder / largest.relative_path, largest.offset + largest.length // 2


def load_with_dcp(config: Any, folder: Path) -> np.ndarray:  # noqa: ANN401
    """Return the weights that plain ``dcp.load`` reads, in one row."""
    model = lesson.make_model(config)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return torch.cat([tensor.flatten() for tensor in state["model"].values()]).numpy()


def damage(config: Any, run_dir: Path, folder: Path) -> dict[str, Any]:  # noqa: ANN401
    """Zero a part of a checkpoint; return how many weights dcp.load reads wrongly, and what the lesson says of it."""
    copy = shutil.copytree(run_dir, folder / "damaged")
    latest = copy / LATEST["sharded"]
    good = or_stop(*in_ranks(1, load_with_dcp, config, latest))
    file, middle = largest_part(latest)
    content = bytearray(file.read_bytes())
    content[middle : middle + ZEROED] = bytes(ZEROED)
    file.write_bytes(content)
    errors, bad = in_ranks(1, load_with_dcp, config, latest)
    found = {"zeroed_bytes": ZEROED, "file": file.name, "dcp_error": next(iter(errors), None)}
    found |= {"weights": good.size, "wrong_weights": None if bad is None else int((bad != good).sum())}
    shutil.rmtree(copy / BEFORE["sharded"])  # with it, the lesson would continue from that one
    resumed = replace(config, checkpoint_form="sharded", resume=True, run_dir=copy)
    errors, _ = in_ranks(SAVED_BY, train, resumed)
    return found | {"lesson_error": errors[0].replace(f"{copy}/", "") if errors else None}


def print_all(figures: dict[str, Any]) -> None:
    """Print the tables, and what happened to the damaged checkpoint."""
    rows = [
        [
            row["form"],
            str(SAVED_BY),
            "not stopped" if row["resumed_by"] is None else str(row["resumed_by"]),
            *(f"{loss:.6f}" for loss in row["losses"]),
            f"{row['difference']:.1e}" if row["difference"] else "0",
        ]
        for row in figures["resumed"]
    ]
    header = ["form", "ranks that saved", "ranks that resumed", "train loss", "val loss", "largest difference"]
    print(format_table(header, rows))
    print()
    print(format_table(["file", "bytes"], [[name, f"{size:,}"] for name, size in figures["file_sizes"].items()]))
    costs = figures["costs"]
    print(
        f"\n{costs['parameters']:,} weights; with their optimizer state {costs['state_bytes'] / 1e6:.1f} MB, "
        f"of which rank 0 has {costs['part_bytes'] / 1e6:.1f} MB"
    )
    rows = [
        [
            way,
            f"{values['memory_bytes'] / 1e6:.1f} MB",
            format_seconds(values["returned"]),
            format_seconds(values["complete"]),
            f"{values['returned_share']:.2f}",
        ]
        for way, values in costs["medians"].items()
    ]
    header = ["saved as", "more memory on rank 0", "training goes on after", "complete after", "ratio"]
    print(format_table(header, rows))
    damaged = figures["damaged"]
    print(f"\n{damaged['zeroed_bytes']:,} bytes of {damaged['file']} were set to zero:")
    said = damaged["dcp_error"] or "no error"
    wrong = "" if damaged["wrong_weights"] is None else f"; {damaged['wrong_weights']:,} weights are wrong"
    print(f"  dcp.load: {said}{wrong}")
    print(f"  this lesson: {damaged['lesson_error'] or 'no error'}")


def medians(saves: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median over the trials of each figure; of the ratio of both times too."""
    found = {}
    for way, trials in saves.items():
        with_ratio = [trial | {"returned_share": trial["returned"] / trial["complete"]} for trial in trials]
        found[way] = {name: statistics.median(trial[name] for trial in with_ratio) for name in with_ratio[0]}
    return found


def main(config: ReshardConfig) -> None:
    """Train, resume, save, damage; print and write what was found."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks are processes on CPUs: one GPU could not be shared by four
    if not Path("/proc/self/clear_refs").exists():
        raise UserError("this experiment reads the memory of its processes from /proc, which only Linux has")
    make_output_folder(config.out)
    with tempfile.TemporaryDirectory(dir=config.out) as scratch:
        folder = Path(scratch)
        resumed = reshard(config, folder)
        sizes = {name: size for form in FORMS for name, size in file_sizes(folder / form, form).items()}
        costs = or_stop(*in_ranks(SAVED_BY, measure_saves, config, folder))
        found = damage(config, folder / "sharded", folder)
    costs["medians"] = medians(costs["saves"])
    figures = {"saved_by": SAVED_BY, "resumed": resumed, "file_sizes": sizes, "costs": costs, "damaged": found}
    print_all(figures)
    write_results(config.out / "save_and_reshard.json", torch.device("cpu"), figures)
    print(f"\nwritten: {config.out / 'save_and_reshard.json'}")


if __name__ == "__main__":
    run_with_config(main, ReshardConfig, __doc__)

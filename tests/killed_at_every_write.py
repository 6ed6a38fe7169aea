"""Run by test_sharded_checkpoints.py: a run is killed before each operation on a file that its saves consist of.

    python killed_at_every_write.py whole|sharded|async FOLDER

Every life of the run is a fork of this process. It continues from the checkpoint that it finds, whose tensors must all
hold the number of its step, and saves twice; before its n-th operation on a file of the run folder it kills itself, n
being one more for each life. Where the operation is fsync, the file loses its second half first, as after a power cut.
The last life is not killed. Prints, as JSON, how the lives ended, and how many complete saves each of them lost.
"""

import json
import mmap
import os
import signal
import struct
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.tensorboard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: F401  # imports what DCP needs

from workshop.config import TrainConfig
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.sampler import DistributedBatchSampler
from workshop.run import Run

CPU = torch.device("cpu")
SAVES = 2
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


class Unchanged:
    def set_epoch(self, epoch: int) -> None: ...

    def __call__(self, images: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return images


class FormConfig(TrainConfig):
    checkpoint_form = "whole"


class ShardedConfig(TrainConfig):
    checkpoint_form = "sharded"


def live(form: str, folder: Path, kill_before: int, shown: mmap.mmap) -> None:
    """Continue and save; in ``shown``: the step found, the steps saved, and the number of operations so far."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    kind = FormConfig if form == "whole" else ShardedConfig
    config = kind(run_dir=folder, epochs=10**6, batch_size=1, save_interval=1, resume=True)
    sampler = DistributedBatchSampler(10**4, 1, shuffle=False, seed=1)
    loader = MemoryLoader(torch.zeros(10**4, 1), torch.zeros(10**4), sampler, Unchanged(), pin_memory=False)
    state = {"model": {"weight": torch.zeros(50)}, "optimizer": {"moment": torch.zeros(3, 5)}}
    tensors = [state["model"]["weight"], state["optimizer"]["moment"]]
    rest = {"scheduler": {"step": 0}}

    def check(found: dict, rest_found: dict, step: int) -> None:
        numbers = {float(number) for part in found.values() for tensor in part.values() for number in tensor.flatten()}
        assert numbers == {float(step)} and rest_found["scheduler"]["step"] == step, (numbers, rest_found, step)

    with Run(config, CPU) as run:
        step = 0
        if form == "whole":
            found = run.load_checkpoint(state | rest)
            if found is not None:
                step = int(found["scheduler"]["step"])
                check({name: found[name] for name in state}, found, step)
        else:
            with run.load_sharded(state | rest) as saved:
                if saved is not None:
                    step = int(saved.state["scheduler"]["step"])
                    dcp.load(state, checkpoint_id=saved.folder, process_group=saved.group)
                    check(state, saved.state, step)
        shown[:8] = struct.pack("ii", step, step)
        operations = 0

        def count(event: str, arguments: tuple) -> None:
            nonlocal operations
            if event in EVENTS and str(folder / "checkpoint") in os.path.abspath(str(arguments[0])):
                next_operation()

        def next_operation() -> None:
            nonlocal operations
            operations += 1
            shown[8:] = struct.pack("i", operations)
            if operations == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)

        def fsync(file: object, sync=os.fsync) -> None:  # noqa: ANN001
            descriptor = file if isinstance(file, int) else file.fileno()
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if operations + 1 == kill_before and os.path.isfile(path):
                os.truncate(path, os.stat(path).st_size // 2)
            next_operation()
            sync(descriptor)

        sys.addaudithook(count)
        os.fsync = fsync
        for _ in run.batches(loader):
            step += 1
            for tensor in tensors:
                tensor.fill_(step)
            rest["scheduler"]["step"] = step
            run.end_step(torch.zeros(()))
            assert run.should_save()
            if form == "whole":
                run.save(state | rest, torch.zeros(()))
            else:
                with run.save_sharded(state, rest, torch.zeros(())) as saving:
                    if form == "async":
                        saving.future = dcp.async_save(state, checkpoint_id=saving.folder, process_group=saving.group)
                    else:
                        dcp.save(state, checkpoint_id=saving.folder, process_group=saving.group)
                if form == "async":
                    tensors[0].fill_(-1)  # what a thread saves has been copied
                    run.position._sharded.wait()
            shown[4:8] = struct.pack("i", step)
            if step == struct.unpack("i", shown[:4])[0] + SAVES:
                break


def main() -> None:
    form, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    lost, statuses, saved_before = [], [], 0
    while not statuses or statuses[-1] == -signal.SIGKILL:
        shown = mmap.mmap(-1, 12)
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as silent:
                os.dup2(silent.fileno(), 1)
            status = 1
            try:
                live(form, folder, len(statuses) + 1, shown)
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        found, saved, _ = struct.unpack("iii", shown[:])
        lost.append(saved_before - found)
        saved_before = saved
    print(json.dumps({"killed": len(statuses) - 1, "statuses": statuses, "lost": lost}))


if __name__ == "__main__":
    main()

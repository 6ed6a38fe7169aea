"""Rung ``device``: the whole data set on the accelerator as bytes; each epoch is augmented and shuffled there."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from workshop.errors import UserError
from workshop.loaders.order import EpochOrder, Loader
from workshop.loaders.transform import BatchTransform

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CGROUP_FILES = {  # by version: limit, memory in use, and in memory.stat the file cache in it that can be had back
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


class DeviceLoader(Loader):
    """Batches (inputs, targets) that are on the device already: views into one large tensor per epoch.

    Raises UserError: the device's memory cannot hold the data set and a transformed epoch of it.
    """

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        sampler: EpochOrder,
        transform: BatchTransform,
        device: torch.device,
    ) -> None:
        epoch_values = images.numel() // sampler.ranks.world_size
        needed = images.nbytes + targets.nbytes + 3 * 4 * epoch_values  # float32: the epoch, and room to make it in
        require_room("device", needed, device, "use --loader memory, or fewer samples with --limit_train")
        self.images = images.to(device)
        self.targets = targets.to(device)
        self.sampler = sampler
        self.transform = transform

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.transform.set_epoch(self.sampler.epoch)
        batches = list(self.sampler.batches())
        if not batches:
            return
        order = torch.cat(batches)
        on_device = order.to(self.images.device)
        images = self.transform(self.images[on_device], order)
        targets = self.targets[on_device]
        sizes = [len(batch) for batch in batches]
        yield from zip(images.split(sizes), targets.split(sizes), strict=True)


def require_room(loader: str, needed: int, device: torch.device, advice: str, what: str = "") -> None:
    """Raise `UserError` unless so many bytes are free on ``device``."""
    free = free_bytes(device)
    if needed > free:
        needs = f"--loader {loader} needs {needed / 1e9:.2f} GB on {device}{what}"
        raise UserError(f"{needs}, but {free / 1e9:.2f} GB are free; {advice}")


def free_bytes(device: torch.device) -> int:
    """Return how much memory is free on ``device``; devices that share the CPU's have what machine and job have left.

    Beyond the limit of a job's control group, which Slurm and containers set, the kernel kills without a word.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """Yield how much each control group that this process is in, and that has a limit, leaves it."""
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, usage, cache = CGROUP_FILES[1 if controllers else 2]
        group = CGROUPS / ("memory" if controllers else "") / path.lstrip("/")
        for folder in (group, *group.parents):  # containers see some of them only, from the top
            with suppress(OSError, ValueError):  # not there, or "max"
                maximum, used = (int((folder / name).read_text()) for name in (limit, usage))
                rows = (row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield maximum - used + int(dict(rows).get(cache, 0))

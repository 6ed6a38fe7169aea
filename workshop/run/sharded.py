"""Sharded checkpoints: a folder to which every rank writes its part; it is complete, or not there, at any moment.

`torch.distributed.checkpoint` (DCP), which a lesson's script calls, writes and reads the tensors. It does not notice a
damaged part, it keeps no earlier checkpoint, and it replaces the files of one folder one by one. Therefore it writes to
a folder with a temporary name here. This module adds the rest of the run's state and a checksum of every file, flushes
all of it to disk, and only then gives the folder its name.
"""

import io
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from workshop.errors import UserError
from workshop.run.checkpoint import previous
from workshop.run.control_group import ControlGroup

STATE_FILE = "run.pt"
"""what is not sharded: the position of the run, the random states of all ranks, the state of the schedule"""
CHECKSUMS = "checksums.json"
"""size and CRC-32 of every other file in the folder; it is written last"""
CHUNK = 1 << 20
"""bytes that are read at a time"""


@dataclass
class Saving:
    """A checkpoint that is being written."""

    folder: Path
    """where `torch.distributed.checkpoint` has to write"""
    group: dist.ProcessGroup
    """a process group over gloo, which nothing else uses at the same time: a thread may write during training"""
    future: Future | None = None
    """what ``dcp.async_save`` has returned; None if everything has been written already"""


@dataclass
class Loading:
    """A checkpoint that has been verified, and fits the run."""

    folder: Path
    """where `torch.distributed.checkpoint` has to read"""
    group: dist.ProcessGroup
    """a process group over gloo"""
    state: dict[str, Any]
    """what is not sharded, as it was given to `Run.save_sharded`"""
    lr_factor: float
    """new ``--lr`` divided by the one of the run that wrote the checkpoint"""
    lr: float
    """new ``--lr``"""

    def scale_lr(self, optimizer: dict[str, Any]) -> None:
        """Multiply the learning rates in the state of an optimizer, after it was read, by what ``--lr`` has changed."""
        if self.lr_factor != 1:
            for group in optimizer["param_groups"]:
                group["lr"] *= self.lr_factor
                group["initial_lr"] = self.lr


@dataclass
class Manifest:
    """What rank 0 knows of a checkpoint before all ranks read its files."""

    folder: Path
    files: dict[str, list[int]] = field(default_factory=dict)
    """size in bytes and CRC-32 of each file, by its name"""
    damage: str = ""
    """why this checkpoint cannot be used; nothing if it can"""


class ShardedCheckpoints:
    """The sharded checkpoints of one run: the latest one, and the one before it.

    Every method is a collective: all ranks call it, in the same order.

    Args:
        path: of the latest one, a folder.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.path = path
        self.rank, self.world_size = rank, world_size
        self.temporary = path.with_suffix(f".tmp{path.suffix}")
        self.control = ControlGroup(rank, world_size)  # its own, because a thread uses it while training goes on
        self.group = self.control.group or dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, state: dict[str, Any]) -> Path:
        """Return the folder to write to, in which ``state`` is already; an earlier save has to be complete.

        Raises UserError: the folder cannot be written.
        """

        def make_folder() -> None:
            with self._one_line():
                for leftover in (self.temporary, self._outdated):
                    if leftover.exists():
                        shutil.rmtree(leftover)
                self.temporary.mkdir()
                with (self.temporary / STATE_FILE).open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())

        self._or_remove(lambda: self.control.on_rank0(make_folder))
        return self.temporary

    def complete(self, future: Future | None = None) -> None:
        """Wait for ``future``; then add the checksums, and give the folder its name.

        Raises UserError: it cannot be written; the checkpoints before it are unchanged.
        """

        def work() -> None:
            with self._one_line():
                if future is not None:
                    future.result()
            checksums = self.control.on_each(self._own_checksums)
            of_all = self.control.gather(checksums)
            self.control.on_rank0(lambda: self._publish(of_all))

        self._or_remove(work)

    def complete_later(self, future: Future) -> None:
        """Have a thread `complete` the checkpoint while training goes on; `wait` raises its errors."""

        def work() -> None:
            try:
                self.complete(future)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="complete_checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that a thread completes is complete; raise its error if there was one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def find(self) -> tuple[Path, str, dict[str, Any]] | None:
        """Return the latest good checkpoint, in words with the reason if it is not the latest one, and its state.

        Every file is read once, each rank reads its share of them, and compared with its checksum. A damaged checkpoint
        is set aside, so that the next one does not push the last good one out.

        Raises UserError: all checkpoints that are there are damaged, or one cannot be read.
        """
        damage = ""
        for folder in (self.path, previous(self.path)):
            manifest = self.control.on_rank0(partial(_read_manifest, folder))
            if manifest is None:
                continue
            if not manifest.damage:
                mine = self.control.on_each(partial(self._verify, manifest))
                of_all = iter(self.control.gather(mine))
                manifest.damage = self.control.on_rank0(partial(next, filter(None, of_all), ""))
            if manifest.damage:
                damage = damage or f"{folder} is damaged ({manifest.damage})"
                continue
            state = self.control.on_each(partial(_read_state, manifest))
            if not damage:
                return folder, str(folder), state
            self.control.on_rank0(self._set_aside)
            return folder, f"{folder}, as {damage},", state
        if damage:
            folders = f"{self.path.name} and {previous(self.path).name}"
            raise UserError(f"cannot go on: {damage}, and no earlier one is good; delete {folders} to start afresh")
        return None

    @property
    def _outdated(self) -> Path:
        return self.path.with_suffix(f".outdated{self.path.suffix}")

    def _set_aside(self) -> None:
        if self.path.exists():
            damaged = self.path.with_suffix(f".damaged{self.path.suffix}")
            if damaged.exists():
                shutil.rmtree(damaged)
            self.path.rename(damaged)

    def _own_checksums(self) -> dict[str, list[int]]:
        """Return size and checksum of what this rank has written; on rank 0 also of what belongs to no rank."""
        with self._one_line():
            found = {}
            for file in sorted(self.temporary.iterdir()):
                writer = re.match(r"__(\d+)_", file.name)  # DCP names its files __RANK_NUMBER.distcp
                if (int(writer[1]) if writer else 0) == self.rank:
                    found[file.name] = list(_size_and_checksum(file))
            return found

    def _publish(self, of_all: list[dict[str, list[int]]]) -> None:
        """Write the checksums, flush the folder to disk and rename it; rank 0 does this when all have written."""
        with self._one_line():
            files = {name: facts for of_rank in of_all for name, facts in of_rank.items()}
            for name, (size, _) in files.items():
                file = self.temporary / name
                if not file.exists() or file.stat().st_size != size:
                    raise UserError(
                        f"rank 0 does not see {file} as another rank has written it: the run folder must be on storage "
                        "that all nodes share; give another --run_dir"
                    )
            with (self.temporary / CHECKSUMS).open("w") as out:
                json.dump({"size in bytes, CRC-32": files}, out, indent=1)
                out.flush()
                os.fsync(out.fileno())
            _flush(self.temporary)
            if self.path.exists():
                if previous(self.path).exists():
                    previous(self.path).rename(
                        self._outdated
                    )  # a folder cannot be replaced, and removing one takes time
                self.path.rename(previous(self.path))
            self.temporary.rename(self.path)
            _flush(self.path.parent)  # else the renames might not last beyond a power cut
            if self._outdated.exists():
                shutil.rmtree(self._outdated)

    def _verify(self, manifest: Manifest) -> str:
        """Read this rank's share of the files; return what is wrong with one, otherwise nothing."""
        for name in sorted(manifest.files)[self.rank :: self.world_size]:
            file = manifest.folder / name
            try:
                if list(_size_and_checksum(file)) != manifest.files[name]:
                    return f"wrong checksum of {name}"
            except FileNotFoundError:  # rank 0 has seen it
                raise UserError(_not_shared(file)) from None
            except OSError as error:
                raise UserError(f"cannot read {file}, which may be whole: {error.strerror or error}") from None
        return ""

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Turn what is raised where a file cannot be written into one line."""
        try:
            yield
        except (OSError, CheckpointException) as error:
            raise UserError(
                f"cannot write {self.path}: {_reason(error)}; the checkpoints before it are as they were"
            ) from None

    @contextmanager
    def writing(self) -> Iterator[Saving]:
        """Give what DCP needs for writing; an error of it is raised as one line, after its files were removed."""
        saving = Saving(self.temporary, self.group)
        try:
            with self._one_line():
                yield saving
        except UserError:
            self._remove()
            raise

    @contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """Turn what DCP raises where it cannot read into one line."""
        try:
            yield
        except (OSError, CheckpointException) as error:
            raise UserError(f"cannot read {folder}, whose checksums are right: {_reason(error)}") from None

    def _or_remove(self, work: Any) -> None:  # noqa: ANN401
        try:
            work()
        except UserError:
            self._remove()
            raise

    def _remove(self) -> None:
        """Free the space of a checkpoint that could not be written."""
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)


def structure(value: Any) -> Any:  # noqa: ANN401
    """Return a nested state with tensors that have only a shape, that of the whole tensor if it is sharded.

    The state of an optimizer by parameter is left out, because it is empty before the first step.
    """
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, device="meta")
    if isinstance(value, dict):
        per_parameter = "state" in value and "param_groups" in value
        return {key: {} if per_parameter and key == "state" else structure(part) for key, part in value.items()}
    return [structure(part) for part in value] if isinstance(value, list) else value


def first_not_finite(tensors: dict[str, Any]) -> str | None:
    """Return the name of a tensor of which this rank's part has a value that is not finite; None without any."""
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and not local.isfinite().all():
            return name
    return None


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _size_and_checksum(file: Path) -> tuple[int, int]:
    size = checksum = 0
    with file.open("rb", buffering=0) as content:
        while chunk := content.read(CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum


def _read_manifest(folder: Path) -> Manifest | None:
    """Return what a checkpoint should consist of, and what of it is missing; None if there is none."""
    if not folder.exists():
        return None
    try:
        ((_, files),) = json.loads((folder / CHECKSUMS).read_text()).items()
        facts = {str(name): [int(size), int(checksum)] for name, (size, checksum) in files.items()}
    except FileNotFoundError:
        return Manifest(folder, damage=f"{CHECKSUMS} is missing")
    except OSError as error:
        raise UserError(f"cannot read {folder / CHECKSUMS}: {error.strerror or error}") from None
    except Exception:  # a content that is not what was written there can raise many types of errors
        return Manifest(folder, damage=f"{CHECKSUMS} cannot be understood")
    for name, (size, _) in facts.items():
        if not (folder / name).exists():
            return Manifest(folder, damage=f"{name} is missing")
        if (actual := (folder / name).stat().st_size) != size:
            return Manifest(folder, damage=f"{name} has {actual} of {size} bytes")
    if STATE_FILE not in facts or ".metadata" not in facts:
        return Manifest(folder, damage=f"{CHECKSUMS} does not name all files")
    return Manifest(folder, facts)


def _read_state(manifest: Manifest) -> dict[str, Any]:
    """Return what is in the file of a good checkpoint that is not sharded; every rank reads it."""
    file = manifest.folder / STATE_FILE
    try:
        content = file.read_bytes()
        if [len(content), zlib.crc32(content)] != manifest.files[STATE_FILE]:
            raise UserError(_not_shared(file))
        return torch.load(io.BytesIO(content), weights_only=True)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(_not_shared(file)) from None
    except Exception as error:  # torch.load raises many types of errors
        raise UserError(f"cannot read {file}, whose checksum is right: {_reason(error)}") from None


def _not_shared(file: Path) -> str:
    where = f"{file} on {os.uname().nodename} is not the file that rank 0 has found"
    return f"{where}: the run folder must be on storage that all nodes share; give another --run_dir"


def _reason(error: BaseException) -> str:
    """Return in a few words why a file could not be written or read, on whichever rank that was."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"{_reason(failure)} (rank {rank})"
    strerror = getattr(error, "strerror", None) or getattr(error.__context__, "strerror", None)
    return strerror or str(error).strip().partition("\n")[0] or type(error).__name__

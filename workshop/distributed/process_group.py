"""Meeting the other ranks: all of them come to MASTER_ADDR:MASTER_PORT, where rank 0 listens."""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from workshop.distributed.heartbeat import SILENCE, Heartbeats, key_of
from workshop.distributed.ranks import Ranks, in_srun, launched_as
from workshop.errors import UserError, leave_with_status_2_when_told_to_end
from workshop.hardware import the_cpu

ONE_EACH = "start one rank per GPU, or train on CPUs with CUDA_VISIBLE_DEVICES= in the environment"
WATCHDOG_SECONDS = 2 * SILENCE
"""how long NCCL's watchdog waits after an error before it aborts the process; the heartbeats report it earlier"""


@contextmanager
def process_group() -> Iterator[tuple[Ranks, torch.device]]:
    """Join the other ranks, over NCCL on CUDA and over gloo on CPUs, and leave them at the end.

    Gives the place of this process among them, and the device it computes on.

    A rank that does not come is waited for 120 seconds, or ``$WORKSHOP_RENDEZVOUS_SECONDS``.

    Raises UserError: the ranks do not know where to meet, cannot meet there, or not all of them come; or only some
    find a GPU of their own.
    """
    ranks = launched_as()
    rank, world_size = ranks.rank, ranks.world_size
    device = _own_device(ranks.local_rank)
    backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if gpu:
        torch.cuda.set_device(gpu)
        set_nccl_defaults()
    store = meet(ranks, device)
    heartbeats = Heartbeats(store, rank, world_size) if world_size > 1 else None  # a rank may die at any moment
    try:  # told of its GPU, NCCL connects now, not in the first step
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=gpu)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"rank {rank} of {world_size} came, but cannot reach the others: {reason}") from None
    try:
        yield ranks, device
    except BaseException as error:
        stopped = isinstance(error, SystemExit) and not error.code  # by all ranks together
        if heartbeats:
            if isinstance(error, UserError):
                heartbeats.stop()
                error.told = _told_by_another(str(error), world_size, store)
            elif stopped:
                heartbeats.close()
            else:
                if any(sign in str(error) for sign in ("gloo", "NCCL", "Connection", "connection")):
                    heartbeats.find_the_dead()
                heartbeats.blame(error)
        if device.type == "cpu" or stopped:  # over NCCL, parting could wait for ranks that wait for this one
            dist.destroy_process_group()
        elif isinstance(error, UserError):  # which is told in one line; torch would warn at the very end
            atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)
        raise
    if heartbeats:
        heartbeats.close()
    dist.destroy_process_group()


def set_nccl_defaults() -> None:
    """Set the environment variables that torch reads when it creates a process group over NCCL; the user's values win.

    - ``TORCH_DIST_USE_NCCL2=0``. Since torch 2.15 the name "nccl" means a new backend. By its code, asking for the
      result of an all-reduce makes the current stream wait for it. DDP asks for it in the middle of backward, so
      communication would not overlap with backward. 0 selects the former backend; torch before 2.15 ignores the
      variable. ``03_ddp/experiments/nccl_backends.py`` measures both, on two GPUs.
    - ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``. When a rank has failed, the NCCL watchdog of each other rank sees an
      error, waits for four times this value, and aborts the process with a C++ stack trace. It must wait longer than
      the heartbeats need to say in one line which rank has failed.

    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` stays as it is, 1 under torchrun and 3 elsewhere. With both values the watchdog
    aborts the process (1 also aborts the communicators before that). It could be silenced with 0, which ignores errors
    and timeouts; but then ranks that wait for different collectives would hang until the end of the job. With 2 the
    watchdog only aborts the communicators, so that training goes on with wrong gradients.
    """
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(round(WATCHDOG_SECONDS * 1000 / 4)))


def _own_device(local_rank: int) -> torch.device:
    """Return this rank's own GPU, else the CPU (of accelerators, only CUDA's, or ROCm's, have collectives here)."""
    if not torch.cuda.is_available():
        return the_cpu()
    gpus = torch.cuda.device_count()
    index = 0 if gpus == 1 and in_srun() else local_rank  # Slurm may show each task its own GPU only, as number 0
    if index >= gpus:
        raise UserError(
            f"local rank {local_rank} finds no GPU of its own on {os.uname().nodename}, which shows {gpus}: {ONE_EACH}"
        )
    return torch.device("cuda", index)


def meet(ranks: Ranks, device: torch.device) -> dist.Store:
    """Return the store through which the ranks find each other, once all of them have come to it."""
    rank, world_size = ranks.rank, ranks.world_size
    address, port = where = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if world_size == 1 and not all(where):
        return dist.HashStore()  # nobody to meet
    if not all(where):
        raise UserError(
            f"{'MASTER_PORT' if address else 'MASTER_ADDR'} is not set, so {world_size} ranks do not know where to "
            "meet: start them with torchrun, or export it as the job files do",
            told=rank > 0,  # all ranks see this
        )
    seconds = os.environ.get("WORKSHOP_RENDEZVOUS_SECONDS", "120")
    if not seconds.isdecimal():
        raise UserError(f"WORKSHOP_RENDEZVOUS_SECONDS={seconds}: give a whole number of seconds", told=rank > 0)
    patience = timedelta(seconds=int(seconds))
    cards = [f"card of rank {other}" for other in range(world_size)]
    gpu = _gpu_identity(device, rank) if device.type == "cuda" else ""
    meeting = Future()

    def come() -> None:  # each of these calls has a limit of its own, or none
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=patience))
            store.set(key_of(rank), "0")
            store.set(cards[rank], json.dumps([world_size, os.uname().nodename, gpu]))
            store.wait(cards, patience)
            meeting.set_result((store, *zip(*map(json.loads, store.multi_get(cards)), strict=True)))
        except Exception as error:
            meeting.set_exception(error)

    try:
        with _silent_stderr():
            threading.Thread(target=come, daemon=True).start()
            store, sizes, nodes, gpus = meeting.result(patience.total_seconds() + 5)  # who keeps to it is first
    except (dist.DistError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"port {port} is in use on this machine; export another MASTER_PORT") from None
        raise UserError(
            f"rank {rank} of {world_size} waited up to {patience.seconds} s at {address}:{port}, but not all came: "
            "start as many processes as the world size says, and see that all nodes can reach that address"
        ) from None
    except ValueError as error:
        raise UserError(f"MASTER_ADDR={address} MASTER_PORT={port} is no place to meet: {error}") from None
    if set(sizes) != {world_size}:
        raise UserError(f"the ranks disagree on how many they are, {min(sizes)} or {max(sizes)}: check WORLD_SIZE")
    lacking = [rank for rank, gpu in enumerate(gpus) if not gpu or gpu in gpus[:rank]]
    if lacking and any(gpus):
        mistake = f"rank {lacking[0]} finds no GPU of its own on {nodes[lacking[0]]}, but others do: {ONE_EACH}"
        raise UserError(mistake, told=_told_by_another(mistake, world_size, store))
    return store


def _gpu_identity(device: torch.device, rank: int) -> str:
    """Return what tells this rank's GPU from the GPUs of all other ranks.

    That is its UUID. But the slices of a GPU that is partitioned by MIG may all have the UUID of that GPU. A process
    sees one slice only, the first one in CUDA_VISIBLE_DEVICES, where each slice has a UUID of its own (``MIG-...``).
    If it is not named there, two ranks cannot be compared, and NCCL finds out whether they share a slice.
    """
    properties = torch.cuda.get_device_properties(device)
    if "MIG" not in properties.name:
        return str(properties.uuid)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return visible if visible.startswith("MIG-") else f"{properties.uuid}, a slice, rank {rank}"


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep torch's C++ side, which logs stack traces of errors that it raises as well, from writing to stderr."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _told_by_another(message: str, world_size: int, store: dist.Store) -> bool:
    """Whether another rank tells the user of the same mistake; when in doubt, not.

    Returns when all ranks have met it too, or some seconds later. Else the first one to leave would take the store
    along, or have the launcher end those that do not know yet with which status to go.
    """
    leave_with_status_2_when_told_to_end()
    key, end = f"told/{message}", time.monotonic() + 5
    told = False
    with suppress(RuntimeError), _silent_stderr():  # the store may go with rank 0, which torch would tell in C++
        told = store.add(key, 1) > 1
        while store.add(key, 0) < world_size and time.monotonic() < end:
            time.sleep(0.05)
    return told

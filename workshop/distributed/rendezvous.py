"""The rendezvous: all ranks connect to MASTER_ADDR:MASTER_PORT, where rank 0 (or torchrun) listens."""

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

from workshop.errors import UserError, exit_2_on_sigterm

HEARTBEAT_KEY = "heartbeat of rank {}"
"""of the store, in which each rank counts up; it must be set before training begins"""
WATCHDOG_SECONDS = 80
"""how long NCCL's watchdog waits after an error before it aborts the process; `failure_detector` reports it earlier"""
ONE_GPU_EACH = "start one rank per GPU, or train on CPUs with CUDA_VISIBLE_DEVICES= in the environment"


def started_by_srun() -> bool:
    """Whether srun started this process as a task of its own; batch scripts and interactive shells are steps too.

    Raises:
        UserError: this is a job of several tasks, but nothing has started the others.
    """
    env = os.environ
    if int(env.get("SLURM_STEP_ID", 2**32 - 5)) < 2**32 - 16:  # higher numbers are the special steps
        return True
    tasks = max(int(env.get("SLURM_NTASKS", 1)), int(env.get("SLURM_NNODES", 1)))  # -N alone sets no tasks
    if tasks > 1:
        raise UserError(f"this job has {tasks} tasks, but only one was started: write srun before it in the job")
    return False


def int_from_env(name: str) -> int:
    """Return the environment variable ``name``, which a launcher has set, as a number of at least 0.

    Raises:
        UserError: it is not set, or not such a number.
    """
    value = os.environ.get(name)
    if value is None or not value.isdecimal():
        found = "is not set" if value is None else f"is {value!r}"
        raise UserError(f"{name} {found}, but it must be a number of at least 0; torchrun and srun set it")
    return int(value)


def let_threads_finish_before_forks() -> None:
    """On Python 3.11, keep the workers of a DataLoader from a deadlock if they are forked just after a collective.

    When a thread of gloo frees the tensors of a finished collective, it registers with Python, and takes a lock of the
    interpreter for a moment. A worker that is forked in this moment waits for that lock forever, because only
    Python 3.12 and newer make it afresh in the new process (`PyOS_AfterFork_Child` in CPython's posixmodule.c). Here
    the thread that forks lets all others run first.
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=lambda: time.sleep(0.001))


def rendezvous(rank: int, world_size: int, device: torch.device) -> dist.Store:
    """Return the store through which the ranks find each other, once all of them have joined.

    A rank that does not join is waited for 120 seconds, or ``$WORKSHOP_RENDEZVOUS_SECONDS``. A single rank needs no
    address. For GPUs, the defaults of `set_nccl_defaults` are set.

    Args:
        rank: of this process.
        world_size: number of ranks.
        device: of this process; the ranks check that each of them has a GPU of its own, or that none has.

    Raises:
        UserError: no address is known, or not all ranks join there; they disagree about their number, or share a GPU.
    """
    if device.type == "cuda":
        set_nccl_defaults()
    let_threads_finish_before_forks()
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} of {world_size}: ranks count from 0; torchrun and srun set them")
    if world_size == 1 and not (address and port):
        return dist.HashStore()
    if not (address and port):
        raise UserError(
            f"{'MASTER_PORT' if address else 'MASTER_ADDR'} is not set, so {world_size} ranks do not know where to "
            "connect: start them with torchrun, or export it as the job files do",
            already_reported=rank > 0,  # all ranks see this
        )
    seconds = os.environ.get("WORKSHOP_RENDEZVOUS_SECONDS", "120")
    if not seconds.isdecimal():
        mistake = f"WORKSHOP_RENDEZVOUS_SECONDS={seconds}: give a whole number of seconds"
        raise UserError(mistake, already_reported=rank > 0)
    timeout = timedelta(seconds=int(seconds))
    rank_info = json.dumps([world_size, os.uname().nodename, _gpu_identity(device, rank)])
    joined: Future[tuple[dist.Store, list[bytes]]] = Future()

    def join() -> None:
        keys = [f"info of rank {other}" for other in range(world_size)]
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
            store.set(HEARTBEAT_KEY.format(rank), "0")
            store.set(keys[rank], rank_info)
            store.wait(keys, timeout)
            joined.set_result((store, store.multi_get(keys)))
        except Exception as error:
            joined.set_exception(error)

    try:
        with silent_stderr():
            threading.Thread(target=join, daemon=True).start()  # because these calls have no common timeout
            store, infos = joined.result(timeout.total_seconds() + 5)  # 5 s more, so that their own timeouts come first
    except (dist.DistError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"port {port} is in use on this machine; export another MASTER_PORT") from None
        raise UserError(
            f"rank {rank} of {world_size} waited up to {seconds} s at {address}:{port}, but not all ranks "
            "joined: start as many processes as the world size says, and check that all nodes can reach that address"
        ) from None
    except ValueError as error:
        raise UserError(f"MASTER_ADDR={address} MASTER_PORT={port} is no address: {error}") from None
    sizes, nodes, gpus = zip(*map(json.loads, infos), strict=True)
    if set(sizes) != {world_size}:
        raise UserError(f"the ranks disagree on their number, {min(sizes)} or {max(sizes)}: check WORLD_SIZE")
    lacking = [other for other, gpu in enumerate(gpus) if not gpu or gpu in gpus[:other]]
    if lacking and any(gpus):
        mistake = f"rank {lacking[0]} finds no GPU of its own on {nodes[lacking[0]]}, but others do: {ONE_GPU_EACH}"
        raise UserError(mistake, already_reported=another_rank_reports(mistake, world_size, store))
    return store


def set_nccl_defaults() -> None:
    """Set the environment variables that torch reads when it creates a process group over NCCL; the user's values win.

    - ``TORCH_DIST_USE_NCCL2=0``. Since torch 2.15 the name "nccl" means a new backend. By its code, asking for the
      result of an all-reduce makes the current stream wait for it. DDP asks for it in the middle of backward, so
      communication would not overlap with backward. 0 selects the former backend; torch before 2.15 ignores the
      variable. ``03_ddp/experiments/nccl_backends.py`` measures both, on two GPUs.
    - ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``. When a rank has failed, the NCCL watchdog of each other rank sees an
      error, waits for four times this value, and aborts the process with a C++ stack trace. It must wait longer than
      `failure_detector` needs to say in one line which rank has failed.

    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` stays as it is, 1 under torchrun and 3 elsewhere. With both values the watchdog
    aborts the process (1 also aborts the communicators before that). It could be silenced with 0, which ignores errors
    and timeouts; but then ranks that wait for different collectives would hang until the end of the job. With 2 the
    watchdog only aborts the communicators, so that training goes on with wrong gradients.
    """
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(round(WATCHDOG_SECONDS * 1000 / 4)))


def _gpu_identity(device: torch.device, rank: int) -> str:
    """Return what distinguishes this rank's GPU from the GPUs of all other ranks; "" for a CPU.

    That is its UUID. But the slices of a GPU that is partitioned by MIG may all have the UUID of that GPU. A process
    sees one slice only, the first one in CUDA_VISIBLE_DEVICES, where each slice has a UUID of its own (``MIG-...``).
    If it is not named there, two ranks cannot be compared, and NCCL finds out whether they share a slice.
    """
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    if "MIG" not in properties.name:
        return str(properties.uuid)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return visible if visible.startswith("MIG-") else f"{properties.uuid}, a slice, rank {rank}"


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Keep torch's C++ side, which logs stack traces of errors that it also raises, from writing to stderr."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def another_rank_reports(message: str, world_size: int, store: dist.Store) -> bool:
    """Whether another rank has found the same mistake earlier and reports it; when in doubt, False.

    Returns when all ranks have found it too, or after 5 seconds. If the first rank exited at once, the store could be
    lost with it, or the launcher could end ranks that do not know their exit status yet.
    """
    exit_2_on_sigterm()
    key, end = f"reported/{message}", time.monotonic() + 5
    reported = False
    with suppress(RuntimeError), silent_stderr():  # the store may be lost with rank 0; torch would log that from C++
        reported = store.add(key, 1) > 1
        while store.add(key, 0) < world_size and time.monotonic() < end:
            time.sleep(0.05)
    return reported

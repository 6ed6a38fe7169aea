"""Errors of PyTorch and of the operating system that users get, and what to do about them.

Only this module relies on private names of torch and on the wording of its messages. If the wording changes, a user
sees a traceback instead of one line.
"""

import errno
import os
import sys
import time
from functools import cache

import torch

RESOURCE_ERRNOS = {
    errno.ENOSPC: "free some space, or give another --run_dir",
    errno.EDQUOT: "your quota is used up: free some space, or give another --run_dir",
    errno.EROFS: "give another --run_dir",
    errno.EACCES: "give a folder that you may read and write",
    errno.ENOTDIR: "give a folder, not a file",
    errno.EEXIST: "give a folder, not a file",
    errno.EMFILE: "take fewer --num_workers, or a higher `ulimit -n`",
    errno.ENOMEM: "take fewer --num_workers, or give the job more memory",
    errno.EAGAIN: "take fewer --num_workers, or a higher `ulimit -u`",
}
"""what to do about errors of the operating system"""

FITS = "take smaller ones, or more ranks (will_it_fit.py of the lesson on sharding computes how many)"
GPU_IS_FULL = f"the model or the batch does not fit into the memory of this GPU: {FITS}"
ADVICE = {
    "can't allocate memory": f"the model or the batch does not fit into the memory of this machine: {FITS}",
    "CUDA out of memory": GPU_IS_FULL,
    "CUBLAS_STATUS_ALLOC_FAILED": GPU_IS_FULL,
    "'out of memory'": GPU_IS_FULL,  # NCCL's: Cuda failure 2 'out of memory'
    "no kernel image is available": "this PyTorch was not compiled for this GPU: install another one (see "
    "docs/installing.md), or train on CPUs with CUDA_VISIBLE_DEVICES= in the environment",
    "DataLoader worker (pid": "a worker has died, often because memory or /dev/shm is full: take fewer --num_workers",
    "unable to mmap": "the memory or /dev/shm is full: take fewer --num_workers, or give the job more memory",
    "</torch_": "/dev/shm is full: take fewer --num_workers, or give the job more of it",
    "unexpected pos": "a checkpoint could not be written to its end, as on a full disk: free some space there",
    "Too many open files": "take fewer --num_workers, or a higher `ulimit -n`",
    "environment variable MASTER_": "start the ranks with torchrun, or export MASTER_ADDR and MASTER_PORT",
    "EADDRINUSE": "another program uses this port: export another MASTER_PORT",
    "The client socket has timed out": "no rank 0 listens there: start all ranks, and check the address",
    "The client socket has failed to connect": "check MASTER_ADDR and MASTER_PORT",
    "Timed out after": "not all ranks have joined: start as many as the world size says",
    "Duplicate GPU detected": "start one rank per GPU, or train on CPUs with CUDA_VISIBLE_DEVICES= in the environment",
    "unable to find address for": "export GLOO_SOCKET_IFNAME, the network interface that all nodes share",
}
"""parts of torch's messages, and what to do"""

LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""parts of torch's messages on a rank whose partner in a collective operation is gone"""


def explain(error: BaseException) -> str | None:
    """Return what is wrong and what to do, in one line; None if nothing is known about this error."""
    if failures := getattr(error, "failures", None):  # torch.distributed.checkpoint wraps what failed on each rank
        rank, (failure, _) = next(iter(failures.items()))
        reason = explain(failure)
        return None if reason is None else f"rank {rank}: {reason}"
    for cause in (error, error.__cause__, error.__context__):  # torch.save raises RuntimeError on top of an OSError
        if isinstance(cause, OSError) and cause.errno in RESOURCE_ERRNOS:
            where = f"{cause.filename}: " if cause.filename else ""
            return f"{where}{cause.strerror}; {RESOURCE_ERRNOS[cause.errno]}"
    if isinstance(error, MemoryError):
        return f"no memory is left; {RESOURCE_ERRNOS[errno.ENOMEM]}"
    text = str(error)
    if "UserError: " in text:  # raised in a loader's worker, whose traceback comes first
        return text.rpartition("UserError: ")[2]
    for part, advice in ADVICE.items():
        if part in text:
            line = next(line for line in text.splitlines() if part in line)
            return f"{line.strip(' .')[:200]}; {advice}"
    return None


def follows_from_another_rank(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone: the launcher then knows the cause, and ends this rank."""
    communication = isinstance(error, RuntimeError | torch.distributed.DistError)
    return communication and any(part in str(error) for part in LOST_CONNECTION)


def backend_class(device: torch.device) -> str:
    """Return the class of the backend that carries the gradients: "nccl" names different ones in different versions."""
    group = torch.distributed.group.WORLD
    assert group is not None, "no process group"
    return type(group._get_backend(device)).__name__


@cache  # once in a process
def let_threads_finish_before_forks() -> None:
    """On Python 3.11, keep the workers of a DataLoader from a deadlock if they are forked just after a collective.

    When a thread of gloo frees the tensors of a finished collective, it takes a lock of the interpreter for a moment. A
    worker that is forked in this moment waits for that lock forever, because only Python 3.12 and newer make it afresh
    in the new process (`PyOS_AfterFork_Child` in CPython's posixmodule.c). So the forking thread lets others run first.
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=lambda: time.sleep(0.001))

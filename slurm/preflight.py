"""Before a class: can this machine, or this cluster, run each lesson? If not, what is to be done?

    make preflight                     # this machine; on a login node, also whether Slurm would accept each job
    sbatch slurm/preflight.slurm       # from the top of the repository: two nodes, and whether their ranks connect

You should see, within a minute, a line for each check (ok, warning or fail; what was found; under it the remedy), then
a line for each lesson. The exit status is 0 if every lesson can run, else 1. A warning is about something that a lesson
can do without.
"""

from __future__ import annotations  # so that a Python that is too old can still run this and report it

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import preflight_checks as checks
from preflight_checks import ALL, LESSONS, SEVERAL_RANKS, CheckResult

ONLY_RANKS = "--only_ranks"  # as torchrun starts it again, to see whether ranks connect on this machine
SLOW_GB_PER_SECOND = {"nccl": 1.0, "gloo": 0.05}


def foundations() -> list[CheckResult]:
    """Check Python, its packages and this repository's package; all other checks need them."""
    results = [checks.python()]
    if results[0].status != "fail":
        results += [*checks.packages(), checks.package()]
    return results


def machine(local_rank: int = 0) -> list[CheckResult]:
    """Check this node: the device, the data, and the folders to write to."""
    every: list[Callable[[], CheckResult | list[CheckResult]]] = [
        checks.driver,
        lambda: checks.device(local_rank),
        checks.gpus_for_lesson_02,
        checks.dali,
        checks.processors,
        checks.shared_memory,
        checks.data,
        checks.runs_folder,
    ]
    results = []
    for check in every:
        found = check()
        results += found if isinstance(found, list) else [found]
    return results


def with_the_other_ranks(mine: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    """Join the other ranks and all-reduce with them; return the results of all ranks on rank 0, none on the others.

    If not all ranks join, each rank returns its own results.
    """
    import torch.distributed as dist

    from lab.process_group import process_group
    from workshop.errors import UserError
    from workshop.run.control_group import ControlGroup

    os.environ.setdefault("WORKSHOP_RENDEZVOUS_SECONDS", "40")
    started = time.monotonic()
    try:
        with process_group() as (rank, world_size, device):
            seconds = time.monotonic() - started
            backend = dist.get_backend()
            gb_per_second = all_reduce_gb_per_second(device)
            gathered = ControlGroup(rank, world_size).gather((checks.this_node(), [vars(result) for result in mine()]))
    except (UserError, RuntimeError) as error:
        remedy = "see `When it does not start` in 03_ddp/experiments/hangs.md: firewall, network, NCCL_SOCKET_IFNAME"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return [*mine(), CheckResult("ranks", "fail", reason, remedy, SEVERAL_RANKS)]
    if rank != 0:
        return []
    nodes = len({node for node, _ in gathered})
    joined = f"{world_size} on {nodes} node(s) joined over {backend} after {seconds:.1f} s, and added up correctly"
    every = [CheckResult(**result) for _, results in gathered for result in results]
    return [
        *every,
        CheckResult("ranks", "ok", joined, lessons=SEVERAL_RANKS),
        bandwidth(gb_per_second, backend, world_size),
    ]


def all_reduce_gb_per_second(device: object, mib: int = 16) -> float:
    """Return the bus bandwidth of the fastest of a few all-reduces; each must give the right sum."""
    import torch
    import torch.distributed as dist

    ranks, times = dist.get_world_size(), []
    for _ in range(5):
        message = torch.full((mib * 2**18,), dist.get_rank() + 1.0, device=device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(message)
        last = message[-1].item()  # waits for the GPU
        times.append(time.perf_counter() - started)
        if last != ranks * (ranks + 1) / 2:
            raise RuntimeError(f"an all-reduce over {ranks} ranks gave {last}, not the sum")
    return 2 * (ranks - 1) / ranks * mib * 2**20 / min(times) / 1e9


def bandwidth(gb_per_second: float, backend: str, ranks: int) -> CheckResult:
    """Report how fast the all-reduce is, and whether that looks like the wrong network; one rank sends nothing."""
    if ranks == 1:
        remedy = "start several, for example with --ntasks-per-node=2"
        return CheckResult("all-reduce", "warning", "one rank sends nothing, so not measured", remedy, SEVERAL_RANKS)
    found = f"{gb_per_second:.2f} GB/s bus bandwidth over {backend}, messages of 16 MiB"
    if gb_per_second < SLOW_GB_PER_SECOND[backend]:
        remedy = "NCCL_DEBUG=INFO names the network in use, NCCL_SOCKET_IFNAME chooses one; or other work runs here"
        return CheckResult("all-reduce", "warning", found, remedy, SEVERAL_RANKS)
    return CheckResult("all-reduce", "ok", found, lessons=SEVERAL_RANKS)


def ranks_on_this_machine() -> list[CheckResult]:
    """Start two ranks as lesson 03 does, on two GPUs or on CPUs, and return what they found."""
    import torch

    from lab.launching import reason

    environment = os.environ | ({} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""})
    environment |= {"OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    try:
        command = [*start, checks.REPOSITORY / "slurm" / "preflight.py", ONLY_RANKS]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired as error:
        ended = subprocess.CompletedProcess(error.cmd, 124, "", f"no answer in {error.timeout} s")
    for line in ended.stdout.splitlines():
        if line.startswith("["):
            return [CheckResult(**result) for result in json.loads(line)]
    remedy = "`torchrun --standalone --nproc-per-node 2 train.py` in 03_ddp says more; does `localhost` resolve?"
    return [CheckResult("ranks", "fail", f"torchrun was to start two: {reason(ended.stderr)}", remedy, SEVERAL_RANKS)]


def merged(results: list[CheckResult]) -> list[tuple[str, CheckResult]]:
    """Put equal results of several nodes into one, and name the nodes of the others."""
    nodes = list(dict.fromkeys(result.node for result in results))
    groups: dict[tuple, list[CheckResult]] = {}
    for result in results:
        groups.setdefault((result.check, result.status, result.found, result.remedy), []).append(result)
    checks_in_order = list(dict.fromkeys(result.check for result in results))
    found = []
    for group in sorted(groups.values(), key=lambda group: checks_in_order.index(group[0].check)):
        here = list(dict.fromkeys(result.node for result in group))
        alone = len({result.node for result in results if result.check == group[0].check}) == 1
        found.append(("" if here == nodes or (alone and group[0].status == "ok") else ", ".join(here), group[0]))
    return found


def show(results: list[CheckResult]) -> int:
    """Print the results, and for each lesson whether it can run, in one piece; return the exit status."""
    lines = [f"on {', '.join(dict.fromkeys(result.node for result in results))}:", ""]
    for nodes, result in merged(results):
        lines.append(f"{result.status:8} {result.check:14} {f'[{nodes}] ' if nodes else ''}{result.found}")
        if result.remedy and result.status != "ok":
            lines.append(f"{'':8} -> {result.remedy}")
    lines.append("")
    status = 0
    for number in ALL:
        fails, warnings = (
            ", ".join(
                dict.fromkeys(result.check for result in results if result.status == kind and number in result.lessons)
            )
            for kind in ("fail", "warning")
        )
        answer = f"cannot run: {fails}" if fails else f"can run{warnings and f', with warnings: {warnings}'}"
        lines.append(f"lesson {LESSONS[number].name}: {answer}")
        status = 1 if fails else status
    print("\n".join(lines), flush=True)
    return status


def main() -> int:
    """Check everything that can be checked from here."""
    os.chdir(checks.REPOSITORY)  # where the commands of the remedies are to be typed
    base = foundations()
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    if any(result.status == "fail" for result in base):
        return show(base) if local_rank == 0 else 1
    from workshop.distributed import started_by_srun
    from workshop.errors import UserError

    if ONLY_RANKS in sys.argv:
        if results := with_the_other_ranks(list):
            print(json.dumps([vars(result) for result in results]), flush=True)
        return 0
    try:
        is_task = started_by_srun()
    except UserError:  # the batch script, or the shell, of a job of several tasks
        is_task = False
    if is_task:
        nodes = os.environ.get("PREFLIGHT_NODES", checks.this_node()).split()
        results = with_the_other_ranks(
            lambda: [*base, *machine(), checks.names(nodes)] if local_rank == 0 else [checks.device(local_rank)]
        )
        apart = any(result.check == "ranks" and result.status == "fail" for result in results)
        if not results or (apart and local_rank > 0):
            return int(apart)
        return show([*results, *checks.slurm()])
    names = checks.names(["localhost", checks.this_node()])
    return show([*base, *machine(), names, *ranks_on_this_machine(), *checks.slurm()])


if __name__ == "__main__":
    sys.exit(main())

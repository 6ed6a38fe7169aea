"""The first minutes of a large allocation: is every rank, every node and the network as fast as the others?

    sbatch slurm/first_hour.slurm                            # from the top of the repository, on the nodes of the job
    torchrun --standalone --nproc-per-node 2 slurm/first_hour.py           # on one machine, without the last table

You should see three tables (the speed of each rank, the bandwidth of all-reduces over all ranks, the bandwidth between
every pair of nodes) and a diagnosis, which names ranks and nodes that are slower than the others. Exit status 3 if
there are any. docs/first_hour.md says what to do then.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SLOW = 0.8
"""a rank, a node or a pair of nodes with less than this share of the median is named"""
CPU_SIZES, GPU_SIZES = (1, 16), (1, 64, 1024)
"""MB that are all-reduced"""
IN_A_ROW = 10
"""number of transfers in flight before waiting, so that the time to start them does not count"""


def ranks_from_env() -> tuple[int, int, int, int, str]:
    """Return rank, local rank, world size, and number and name of the node, as torchrun or srun have set them."""
    env = os.environ
    if "RANK" in env:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")
    elif "SLURM_PROCID" in env:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID")
    else:
        print("error: start this with srun or torchrun: sbatch slurm/first_hour.slurm", file=sys.stderr)
        sys.exit(2)
    rank, local_rank, world_size, node = (int(env[name]) for name in names)
    return rank, local_rank, world_size, node, env.get("SLURMD_NODENAME") or socket.gethostname()


def unlike_the_others(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each rank whose GPUs are not as most ranks have them: a GPU may have failed there."""
    usual = Counter((one["gpus"], one["device"]) for one in ranks).most_common(1)[0][0]
    lines = []
    for one in ranks:
        if (one["gpus"], one["device"]) != usual:
            lines.append(
                f"rank {one['rank']} on {one['name']} has {one['gpus']} x {one['device']}, most have {usual[0]}"
            )
        elif one["gpus"] > 1 and one["local_rank"] >= one["gpus"]:
            lines.append(f"rank {one['rank']} on {one['name']} has no GPU of its own: there are {one['gpus']}")
    return lines


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed all that was started."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def compute_speed(device: torch.device, seconds: float, times: int) -> float:
    """Return the TFLOP/s of products of large matrices on this rank's device, while all ranks compute.

    On a GPU it is the median of the last third of the products, because a GPU that becomes too hot slows down after
    seconds; on a CPU the best, because other programs disturb it. ``times`` above 1 computes each product that often
    and counts it once. So it simulates a slow rank.
    """
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    dist.barrier()
    speeds: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(speeds) < 3:
        began = time.perf_counter()
        for _ in range(IN_A_ROW * times):
            torch.mm(left, right)
        synchronize(device)
        speeds.append(IN_A_ROW * 2 * size**3 / (time.perf_counter() - began) / 1e12)
    return statistics.median(speeds[-(len(speeds) // 3) :]) if device.type == "cuda" else max(speeds)


def gb_per_second(nbytes: float, transfer: Callable[[], object], device: torch.device) -> float:
    """Return the bandwidth of transfers of ``nbytes`` each, the first one left out."""
    transfer()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(IN_A_ROW):
        transfer()
    synchronize(device)
    return nbytes * IN_A_ROW / (time.perf_counter() - began) / 1e9


def all_reduce_bandwidth(megabytes: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the bus bandwidth in GB/s of an all-reduce over all ranks, as nccl-tests defines it; on the slowest rank.

    That is the bytes that each rank sends in a ring, 2 (n - 1) / n times those of the data, per second
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    values = torch.zeros(megabytes * 1_000_000 // 4, device=device)
    ranks = dist.get_world_size()
    dist.barrier()
    speed = gb_per_second(values.nbytes * 2 * (ranks - 1) / ranks, lambda: dist.all_reduce(values, group=group), device)
    slowest = torch.tensor(speed)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return slowest.item()


def rounds_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of a round-robin tournament: each pair of nodes meets once, each node in one pair at a time."""
    places = [*range(nodes), *([-1] if nodes % 2 else [])]  # against -1 a node pauses
    rounds = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def pair_bandwidths(
    ranks: Sequence[dict[str, Any]], rank: int, device: torch.device, group: dist.ProcessGroup | None
) -> dict[tuple[int, int], float]:
    """Return the GB/s that this rank exchanges with the same local rank of each other node, both directions together.

    All ranks of two nodes do so at the same time, so all adapters are used. The pairs of a round do not disturb each
    other, except in what they share of the network.
    """
    place = {(one["node"], one["local_rank"]): one["rank"] for one in ranks}
    nodes = sorted({one["node"] for one in ranks})
    mine, local_rank = ranks[rank]["node"], ranks[rank]["local_rank"]
    given, taken = (torch.zeros((256 if device.type == "cuda" else 8) * 250_000, device=device) for _ in range(2))
    found = {}
    for pairs in rounds_of(len(nodes)):
        dist.barrier()
        for a, b in pairs:
            pair = nodes[a], nodes[b]
            other = place.get((pair[1] if mine == pair[0] else pair[0], local_rank))
            if mine not in pair or other is None:
                continue

            def exchange(other: int = other) -> None:
                sends, receives = (
                    dist.P2POp(dist.isend, given, other, group),
                    dist.P2POp(dist.irecv, taken, other, group),
                )
                for work in dist.batch_isend_irecv([sends, receives]):
                    work.wait()

            found[pair] = gb_per_second(2 * given.nbytes, exchange, device)
    return found


def diagnose(ranks: Sequence[dict[str, Any]], pairs: dict[tuple[int, int], float]) -> list[str]:
    """Return a line for each rank, node and pair of nodes that is slower than the others.

    A node is named if its best connection is slow, because then all are; a pair if only its own connection is slow.
    With two nodes, one cannot tell which of them is at fault.

    Args:
        ranks: of each: rank, node (its number), name (of the node) and tflops.
        pairs: GB/s by the numbers of two nodes.
    """
    names = {one["node"]: one["name"] for one in ranks}
    typical = statistics.median(one["tflops"] for one in ranks)
    lines = [
        f"rank {one['rank']} on {one['name']} computes at {one['tflops'] / typical:.0%} of the median"
        for one in ranks
        if one["tflops"] < SLOW * typical
    ]
    if len(pairs) < 3:
        return lines
    best = {node: max(speed for pair, speed in pairs.items() if node in pair) for node in names}
    usual = statistics.median(best.values())
    slow = [node for node in names if best[node] < SLOW * usual]
    lines += [f"node {names[node]} is slow in all its connections" for node in slow]
    return lines + [
        f"the connection of {names[a]} and {names[b]} is slow"
        for (a, b), speed in sorted(pairs.items())
        if speed < SLOW * usual and a not in slow and b not in slow
    ]


def measure(
    mine: dict[str, Any], device: torch.device, timeout: timedelta, *, seconds: float, times: int
) -> dict[str, Any]:
    """Return what all ranks have found together. All ranks call this."""
    rank, world_size = mine["rank"], dist.get_world_size()
    # NCCL: what a group of gloo alone cannot do
    group = dist.new_group(backend="nccl", timeout=timeout) if device.type == "cuda" else None
    mine["tflops"] = compute_speed(device, seconds, times)
    ranks: list[Any] = [None] * world_size
    dist.all_gather_object(ranks, mine)
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    bandwidths = {size: all_reduce_bandwidth(size, device, group) for size in sizes}
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, pair_bandwidths(ranks, rank, device, group))
    pairs: dict[tuple[int, int], float] = {}
    for one, found in zip(ranks, of_ranks, strict=True):
        for pair, speed in found.items():  # all adapters of a node together, as its first rank of the pair measured it
            if one["node"] == pair[0]:
                pairs[pair] = pairs.get(pair, 0.0) + speed
    return {"ranks": ranks, "all_reduce": bandwidths, "pairs": pairs, "diagnosis": diagnose(ranks, pairs)}


def main() -> None:
    """Compare the ranks; measure; print the tables on rank 0; exit with 3 if something is slow or missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="additional file for the measurements, as JSON")
    parser.add_argument("--seconds", type=float, help="seconds of computing per rank (default: 20 on GPUs, 1 on CPUs)")
    parser.add_argument(
        "--slow_rank", type=int, metavar="R", help="rank that computes four times as much, to simulate a slow one"
    )
    parser.add_argument(
        "--timeout_minutes", type=float, default=3.0, help="minutes that a rank waits for the others (default: 3)"
    )
    flags = parser.parse_args()
    rank, local_rank, world_size, node, name = ranks_from_env()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # the backend of the lessons; 03_ddp/train.py says why
    # Over gloo first: a node whose GPUs have failed can still say so.
    timeout = timedelta(minutes=flags.timeout_minutes)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    mine = {"rank": rank, "local_rank": local_rank, "node": node, "name": name, "gpus": gpus}
    mine["device"] = torch.cuda.get_device_name(device) if gpus else "CPU"
    ranks: list[Any] = [None] * world_size
    dist.all_gather_object(ranks, mine)
    lines = unlike_the_others(ranks)
    found: dict[str, Any] = {"ranks": ranks, "diagnosis": lines}
    if not lines:
        if gpus:
            torch.cuda.set_device(device)
        seconds = flags.seconds or (20.0 if gpus else 1.0)
        found = measure(mine, device, timeout, seconds=seconds, times=4 if rank == flags.slow_rank else 1)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print_tables(found)
        if flags.out:
            pairs = {f"{a}-{b}": speed for (a, b), speed in found.get("pairs", {}).items()}
            flags.out.write_text(json.dumps(found | {"pairs": pairs}, indent=1) + "\n")
    sys.exit(3 if found["diagnosis"] else 0)


def print_tables(found: dict[str, Any]) -> None:
    """Print what was measured, and what is slow."""
    names = {one["node"]: one["name"] for one in found["ranks"]}
    print(f"{'rank':>4}  {'node':20}  {'device':24}  {'TFLOP/s':>8}")
    for one in found["ranks"]:
        print(f"{one['rank']:>4}  {one['name']:20}  {one['device']:24}  {one.get('tflops', float('nan')):8.3f}")
    if "all_reduce" in found:
        print(f"\n{'all-reduce of':>14}  bus bandwidth")
        for size, speed in found["all_reduce"].items():
            print(f"{size:>11} MB  {speed:8.2f} GB/s")
    if found.get("pairs"):
        print(f"\n{'two nodes':42}  both directions")
        for (a, b), speed in sorted(found["pairs"].items()):
            print(f"{names[a] + ' and ' + names[b]:42}  {speed:8.2f} GB/s")
    print("\n" + "\n".join(found["diagnosis"] or ["nothing is slower than the rest"]), flush=True)


if __name__ == "__main__":
    main()

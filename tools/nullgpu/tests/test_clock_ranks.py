"""Collectives take time, wait for the slowest rank, and share a network; no test depends on the speed of a machine."""

import json
import re
from pathlib import Path

import pytest

from conftest import Run
from nullgpu import gpus


@pytest.mark.slow
def test_collectives_of_an_imaginary_world_take_time(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "x = torch.zeros(50_000_000, device='cuda')\ndist.all_reduce(x)\ntorch.cuda.synchronize()\n"
        "a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "a.record()\ndist.all_reduce(x)\nb.record()\ntorch.cuda.synchronize()\nprint('ms', a.elapsed_time(b))\n"
    )
    times = []
    for world in (8, 64):
        # the host's time must not count
        done = nullgpu("--clock", "h100", "--host", 1000, "--gpus", 8, "--world", world, "python", script)
        assert done.status == 0, done.stderr
        times.append(float(re.search(r"ms ([\d.]+)", done.stdout)[1]))  # type: ignore[index]
    inside = gpus.read("h100")["clock"]["inside"]["bandwidth"]
    assert times[0] == pytest.approx(1e3 * 2 * 7 / 8 * 2e8 / inside, rel=0.1)
    assert times[1] > times[0]


@pytest.mark.slow
def test_collectives_of_two_streams_share_the_network(tmp_path: Path, nullgpu: Run) -> None:
    """As the all-gathers and reduce-scatters of FSDP2: no step is shorter than its bytes divided by the bandwidth."""
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "other = dist.new_group(use_local_synchronization=False)\n"
        "x, y = (torch.zeros(50_000_000, device='cuda') for _ in range(2))\n"
        "dist.all_reduce(x), dist.all_reduce(y, group=other)\ntorch.cuda.synchronize()\n"
        "a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "for groups in ([None], [None, other]):\n    a.record()\n"
        "    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip((x, y), groups)]\n"
        "    [work.wait() for work in works]\n    b.record()\n    torch.cuda.synchronize()\n"
        "    print('ms', a.elapsed_time(b))\n"
    )
    done = nullgpu("--clock", "h100", "--host", 1000, "--gpus", 8, "--world", 64, "python", script)
    assert done.status == 0, done.stderr
    one, two = (float(ms) for ms in re.findall(r"ms ([\d.]+)", done.stdout))
    assert two == pytest.approx(2 * one, rel=0.1)


@pytest.mark.slow
def test_the_report_of_sharded_weights_names_the_network(tmp_path: Path, nullgpu: Run) -> None:
    """FSDP2 lets the stream of the training wait for one that waits for NCCL's."""
    slow = tmp_path / "slow.toml"
    slow.write_text('like = "a100"\n[clock.between]\nbandwidth = 1e9\n')
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
        "torch.cuda.set_device(0)\ndist.init_process_group('nccl', device_id=torch.device('cuda', 0))\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()\n"
        "for layer in model:\n    fully_shard(layer)\nfully_shard(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.ones(64, 2048, device='cuda')\n"
        "for _ in range(8):\n    model(x).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    figures = tmp_path / "figures.json"
    done = nullgpu(
        *("--gpus", 4, "--world", 16, "--clock", slow, "--host", 20, "--json", figures, "python"), tmp_path / "train.py"
    )
    assert done.status == 0, done.stderr[-2000:]
    waits = json.loads(figures.read_text())["clock"]["ranks"][0]["waits"]
    assert waits["communication"] > 0.8


@pytest.mark.slow
def test_a_rank_waits_for_a_slower_one_and_the_report_says_for_which(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])\ntorch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda', rank))\n"
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda())\n"
        "o = torch.optim.SGD(m.parameters(), 0.1)\nx = torch.zeros(256 if rank == 0 else 2048, 4096, device='cuda')\n"
        "for _ in range(8):\n    o.zero_grad()\n    m(x).sum().backward()\n    o.step()\n"
    )
    trace, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    options = ("--clock", "a100", "--host", 60, "--gpus", 2)  # the host's time must not count
    launcher = ("torchrun", "--standalone", "--nproc_per_node", 2)
    done = nullgpu(*options, "--trace", trace, "--json", figures, *launcher, script)
    assert done.status == 0, done.stderr
    first, second = json.loads(figures.read_text())["clock"]["ranks"]
    assert first["waits"]["rank 1"] > 0.5
    assert second["busy"] > 0.5
    assert second["waits"].get("rank 0", 0) <= 0.005, "the slower rank waits for nobody"
    assert f"it waits for rank 1 {first['waits']['rank 1']:.0%}" in done.stdout
    assert f"rank 1: GPU busy {second['busy']:.0%}" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "AllReduce"} == {0, 1}


@pytest.mark.thorough
def test_sends_and_receives_wait_for_the_sender_and_move_both_ways_at_once(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "ring.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])\ntorch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda', rank))\n"
        "x, y, big = (torch.zeros(n, device='cuda') for n in (50_000_000, 50_000_000, 2048 * 2048))\n"
        "a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))\ndist.all_reduce(x[:8])\n"
        "torch.cuda.synchronize()\na.record()\n"
        "if rank:\n    big.view(2048, 2048) @ big.view(2048, 2048)\n"
        "def both():\n    pair = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]\n"
        "    for one in dist.batch_isend_irecv(pair):\n        one.wait()\n"
        "both()\nb.record()\nboth()\nc.record()\ntorch.cuda.synchronize()\n"
        "print('ms', a.elapsed_time(b), b.elapsed_time(c), flush=True)\n"
    )
    launcher = ("torchrun", "--standalone", "--nproc_per_node", 2)
    done = nullgpu("--clock", "a100", "--host", 1000, "--gpus", 2, *launcher, script)
    assert done.status == 0, done.stderr
    figures = gpus.read("a100")["clock"]
    transfer = 1e3 * 200_000_000 / figures["inside"]["bandwidth"]
    product = 1e3 * 2 * 2048**3 / figures["peak"]["fp32"]
    both = re.findall(r"ms ([\d.]+) ([\d.]+)", done.stdout)
    assert len(both) == 2
    for first, second in both:  # rank 0 has nothing to compute, but receives only when rank 1 has sent
        assert product + transfer < float(first) < 2 * product + 1.5 * transfer
        assert transfer < float(second) < 1.5 * transfer


@pytest.mark.slow
def test_a_group_within_a_node_is_faster_than_one_over_nodes(nullgpu: Run, tmp_path: Path) -> None:
    """Of a mesh of two dimensions, with one process that stands for all ranks."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "torch.cuda.set_device(0)\ndist.init_process_group('nccl', device_id=torch.device('cuda', 0))\n"
        "mesh = init_device_mesh('cuda', (4, 4), mesh_dim_names=('over', 'within'))\n"
        "model, numbers = torch.nn.Linear(2, 2).cuda(), torch.zeros(1 << 24, device='cuda')\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(8):\n"
        "    for name in ('over', 'within'):\n        dist.all_reduce(numbers, group=mesh.get_group(name))\n"
        "    dist.all_reduce(numbers)\n    model(torch.ones(1, 2, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = nullgpu(
        *("--gpus", 4, "--world", 16, "--clock", "a100", "--trace", tmp_path / "trace.json"),
        *("python", tmp_path / "train.py"),
    )
    assert done.status == 0, done.stderr[-2000:]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    over, within, all_ranks = [e["dur"] for e in events if e.get("name") == "AllReduce"][-3:]
    assert within < 0.6 * over and over < all_ranks, "within a node, over four, over all"

"""What `nullgpu` promises: its errors, the GPUs that a command sees, and NCCL between two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

import nullgpu as package
from conftest import Run
from nullgpu import build, symbols

HERE = Path(__file__).resolve().parent
MISSING = """\
cudaGraphAddNode cudaGraphConditionalHandleCreate cudaIpcCloseMemHandle cudaIpcGetEventHandle cudaIpcGetMemHandle
cudaIpcOpenEventHandle cudaIpcOpenMemHandle cudaLibraryGetGlobal cudaLibraryGetKernel cudaLibraryGetKernelCount
cudaLibraryGetManaged cudaLibraryGetUnifiedFunction cudaLibraryLoadData cudaLibraryLoadFromFile cudaLibraryUnload
cudaStreamBeginCaptureToGraph cudnnGetFilterNdDescriptor cudnnGetRNNTempSpaceSizes cudnnGetRNNWeightParams
cudnnGetRNNWeightSpaceSize cudnnGetTensorNdDescriptor cusparseGetErrorString
cusparseLtMatmulAlgGetAttribute cusparseLtMatmulGetWorkspace cusparseLtMatmulSearch cusparseSpMatGetSize
cusparseXbsrsm2_zeroPivot cusparseXbsrsv2_zeroPivot cusparseXcsrgeam2Nnz ncclCommGetUniqueId ncclCommGrow
ncclCommResume ncclCommRevoke ncclCommShrink ncclCommSuspend ncclCommWindowDeregister ncclCommWindowRegister
ncclDevCommCreate ncclDevCommDestroy ncclGetLsaMultimemDevicePointer ncclGetPeerDevicePointer ncclGroupSimulateEnd
ncclPutSignal ncclSignal ncclWaitSignal ncclWinGetUserPtr"""
"""functions that PyTorch 2.15 may call, and that end the process with their names"""


# ---- the command itself


def test_without_a_compiler_one_line_says_what_to_install(tmp_path: Path, nullgpu: Run) -> None:
    error = nullgpu("/bin/true", PATH=str(tmp_path), NULLGPU_CACHE=str(tmp_path / "cache")).error
    assert "needs a C++ compiler: install g++" in error


def test_an_unknown_command_is_named(nullgpu: Run) -> None:
    assert nullgpu("no_such_command", "--help").error == "no command no_such_command"


def test_without_a_command_an_example_is_shown(nullgpu: Run) -> None:
    result = nullgpu("--gpus", 2)
    assert result.status == 2 and "no command: nullgpu python train.py, for example" in result.stderr


@pytest.mark.parametrize(("command", "status"), [("exit 7", 7), ("kill -TERM $$", 128 + 15), ("true", 0)])
def test_the_exit_status_is_the_commands(command: str, status: int, nullgpu: Run) -> None:
    assert nullgpu("sh", "-c", command).status == status


def test_an_ld_preload_of_the_user_stays_effective(tmp_path: Path, nullgpu: Run) -> None:
    source, own = tmp_path / "own.c", tmp_path / "own.so"
    source.write_text("int of_the_user;")
    subprocess.run([os.environ.get("CXX", "g++"), "-shared", "-fPIC", source, "-o", own], check=True)
    loaded = nullgpu("cat", "/proc/self/maps", LD_PRELOAD=str(own)).stdout
    assert str(own) in loaded and str(build.library()) in loaded


def test_a_cache_with_a_space_in_its_path_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LD_PRELOAD takes no such path."""
    monkeypatch.setenv("NULLGPU_CACHE", str(tmp_path / "x y"))
    folder = build.cache()
    assert folder.is_dir() and " " not in str(folder)


@pytest.mark.thorough  # compiles
def test_a_command_runs_with_a_cache_with_a_space_in_its_path(tmp_path: Path, nullgpu: Run) -> None:
    script = "import torch; print(torch.cuda.is_available())"
    result = nullgpu("python", "-c", script, NULLGPU_CACHE=str(tmp_path / "x y"))
    assert (result.status, result.stdout) == (0, "True\n"), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("values", [False, True])
def test_a_process_gets_null_gpus_by_its_environment(library: Path, values: bool) -> None:
    env = package.environment({"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}, gpus=2, gb=3, values=values)
    script = "import torch; print(torch.cuda.device_count(), (torch.ones(2, device='cuda') + 1).sum().item())"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "4.0" if values else "0.0"], done.stderr


@pytest.mark.slow
def test_the_report_has_its_figures_as_json(tmp_path: Path, nullgpu: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nm = torch.nn.Linear(64, 64).cuda()\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(8):\n    o.zero_grad()\n    loss = m(torch.zeros(4, 64, device='cuda')).sum()\n"
        "    loss.backward()\n    o.step()\n    loss.item()\n"
    )
    figures = tmp_path / "figures.json"
    done = nullgpu("--report", "--snapshot", tmp_path / "memory.pickle", "--json", figures, "python", script)
    (rank,) = json.loads(figures.read_text())["report"]["ranks"]
    assert (rank["counted"], rank["updates"], rank["step"]["waits"]) == (5, 8, 1.0)
    assert f"{rank['step']['launches']:9,.0f}  kernel launches" in done.stdout
    assert f"What to change first: {rank['advice']}" in done.stdout and "train.py:9" in rank["advice"]


# ---- the functions that PyTorch needs


def functions_of_torch() -> set[str]:
    """Return the functions of CUDA and its libraries that PyTorch and torchvision leave undefined."""
    torch = build.torch_folder()
    return set().union(*map(symbols.undefined, [*torch.glob("lib/*.so"), *torch.parent.glob("torchvision/*.so")]))


def test_every_function_that_pytorch_needs_is_there(library: Path) -> None:
    nm = ["nm", "-D", "--defined-only", library]
    printed = subprocess.run(nm, capture_output=True, text=True, check=True).stdout
    assert not functions_of_torch() - {line.split()[-1].partition("@")[0] for line in printed.splitlines()}


@pytest.mark.skipif(not build.version().startswith("2.15"), reason="the list is that of PyTorch 2.15")
def test_the_functions_that_are_missing_are_known(library: Path) -> None:
    generated = (library.parent / "generated.cpp").read_text()
    missing = {name for name in functions_of_torch() if f'nullgpu::missing("{name}")' in generated}
    print("missing:", *sorted(missing))
    assert missing == set(MISSING.split())


# ---- one process on a GPU of 1 GiB


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, nullgpu: Run) -> dict:
    """What `probes.py alone` has found."""
    return probes(nullgpu, tmp_path_factory.mktemp("alone"), "alone", "--gb", "1")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, nullgpu: Run) -> dict:
    """What `probes.py ranks` has found."""
    options = ("--gpus", "2", "--gb", "2048", "--values", "--timeout", "60")
    return probes(nullgpu, tmp_path_factory.mktemp("ranks"), "ranks", *options)


def probes(nullgpu: Run, folder: Path, which: str, *options: str) -> dict:
    """Run probes; return what they have found, and their stderr."""
    result = nullgpu(*options, "python", HERE / "probes.py", which, folder / "found.json")
    assert result.status == 0, result.stderr[-3000:]
    return json.loads((folder / "found.json").read_text()) | {"stderr": result.stderr}


def test_cuda_and_nvml_say_how_much_memory_is_used(alone: dict) -> None:
    found = alone["memory"]
    assert found["total"] == 1024
    assert found["before"] == found["after"] == [1024, 0]
    assert found["with"] == [924, 100]


def test_nvml_sees_the_gpus_and_that_they_are_idle(alone: dict) -> None:
    assert (alone["memory"]["devices"], alone["memory"]["utilization"]) == (1, 0)


def test_nvml_answers_what_monitors_ask(alone: dict) -> None:
    """What a GPU does not have, or does not tell, is "not supported", which monitors know."""
    found = alone["monitors"]
    assert not {name for name, answer in found.items() if "FunctionNotFound" in answer}
    assert found["CudaComputeCapability"] == "(9, 0)"
    cpus = [
        64 * word + bit
        for word, bits in enumerate(json.loads(found["CpuAffinity:4"]))
        for bit in range(64)
        if bits >> bit & 1
    ]
    assert set(cpus) == os.sched_getaffinity(0)


def test_pytorch_runs_out_of_memory_as_on_a_gpu_of_this_size(alone: dict) -> None:
    error = alone["out_of_memory"]["error"]
    assert error.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "GPU 0 has a total capacity of 1024.00 MiB" in error
    assert alone["out_of_memory"]["allocated_then"] == 1


def test_the_profiler_sees_kernels(alone: dict) -> None:
    assert any("CUDAFunctor_add" in name for name in alone["profiler"])


def test_a_graph_that_is_captured_forbids_to_wait(alone: dict) -> None:
    assert "CUDA error: operation not permitted when stream is capturing" in alone["item_in_graph"]


EMBEDDING = """
import torch
embedding = torch.nn.Embedding(512, 64).cuda()
embedding(torch.zeros(4, 1024, dtype=torch.long, device="cuda")).sum().backward()
torch.arange(9000, device="cuda").sort()
torch.cuda.synchronize()
print("sorted", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_sorting_runs_on_each_kind_of_gpu(sm: int, nullgpu: Run) -> None:
    """CUB chooses its kernels by the version of the code, which PyTorch does not have for each compute capability."""
    found = nullgpu("--sm", str(sm), sys.executable, "-c", EMBEDDING)
    assert found.stdout == "sorted\n", found.stdout + found.stderr  # a process can still abort while its threads end


@pytest.mark.thorough
def test_a_fork_after_importing_torch_may_use_the_gpu(nullgpu: Run) -> None:
    script = "import os, torch\nif os.fork() == 0: torch.zeros(1, device='cuda'); os._exit(5)\nprint(os.wait()[1] >> 8)"
    assert nullgpu("python", "-c", script).stdout == "5\n"


# ---- values, and pairs of ranks with the former and the new backend of NCCL


@pytest.mark.slow
def test_values_that_do_not_fit_into_the_memory_of_the_host_are_out_of_memory(ranks: dict) -> None:
    """A script may catch PyTorch's own error and go on; a line, written once, says which memory is full."""
    found = ranks["more_than_the_host_has"]
    for error in (found["error"], found["again"]):
        assert error.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 GiB.")
    assert found["value"] == [1, 1, 1]
    (line,) = (line for line in ranks["stderr"].splitlines() if line.startswith("nullgpu: note: out of memory"))
    assert "with --values the memory of the GPUs is memory of this machine" in line


def test_expandable_segments_grow(ranks: dict) -> None:
    (segment,), tensors, used = ranks["segments"]
    assert tensors == 3
    assert segment == [True, used >> 20] and 350 <= used >> 20 < 400


@pytest.mark.parametrize("new_backend", [False, True])
def test_a_rank_receives_what_another_sends(ranks: dict, new_backend: bool) -> None:
    assert ranks[f"send_and_receive {new_backend}"] == [None, [1, 2, 3]]


@pytest.mark.parametrize("new_backend", [False, True])
def test_ranks_that_call_different_collectives_are_named(ranks: dict, new_backend: bool) -> None:
    first, second = ranks[f"different_collectives {new_backend}"]
    assert "the ranks differ: rank 0 calls AllReduce" in first and "rank 1 Broadcast" in first
    assert "the ranks differ: rank 1 calls Broadcast" in second and "rank 0 AllReduce" in second
    first, second = ranks[f"different_sizes {new_backend}"]
    assert "rank 0 calls AllReduce with 16 bytes of float32" in first and "rank 1 AllReduce with 20 bytes" in first


@pytest.mark.parametrize("new_backend", [False, True])
def test_a_rank_that_dies_ends_the_wait_of_the_other_one(ranks: dict, new_backend: bool) -> None:
    error, status = ranks[f"rank_dies {new_backend}"]
    assert "rank 1 has ended, while rank 0 waits for it in AllReduce" in error
    assert status == 3


# ---- values


@pytest.mark.slow
def test_a_compiled_model_has_values(nullgpu: Run) -> None:
    script = (
        "import torch\nm = torch.nn.Linear(4, 4).cuda()\nx = torch.ones(4, device='cuda')\n"
        "print(torch.equal(torch.compile(m, fullgraph=True)(x), m(x)), m(x).sum().item() != 0)"
    )
    assert nullgpu("--values", "python", "-c", script).stdout == "True True\n"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nccl", "nccl-legacy"])
def test_a_script_of_ones_own_is_one_rank_of_an_imaginary_world(tmp_path: Path, backend: str, nullgpu: Run) -> None:
    if backend != "nccl" and not hasattr(torch.distributed.distributed_c10d, "_register_builtin_nccl_legacy_backend"):
        pytest.skip("this PyTorch has one backend of NCCL")
    script = tmp_path / "train.py"
    script.write_text(
        f"import torch, torch.distributed as dist\ndist.init_process_group('{backend}')\ntorch.cuda.set_device(0)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())\n"
        "model(torch.zeros(2, 8, device='cuda')).sum().backward()\n"
        "mine = torch.tensor([3], device='cuda')\nall_of_them = [torch.zeros_like(mine) for _ in range(4)]\n"
        "dist.all_gather(all_of_them, mine)\ndist.all_reduce(mine)\n"
        "print([t.item() for t in all_of_them], mine.item(), dist.get_world_size())\n"
    )
    done = nullgpu("--world", 4, "python", script)
    assert "[3, 3, 3, 3] 12 4" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("new_backend", ["0", "1"])
@pytest.mark.parametrize("device", ["", ", device_id=torch.device('cuda', 0)"])
def test_a_group_of_an_imaginary_world_has_its_own_size(
    tmp_path: Path, new_backend: str, device: str, nullgpu: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL asks the ranks how large a group is that is split from another; the other ranks do not exist."""
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", new_backend)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        f"torch.cuda.set_device(0)\ndist.init_process_group('nccl'{device})\n"
        "groups = init_device_mesh('cuda', (2, 4)).get_all_groups() + [dist.new_group([0, 3, 5]), dist.group.WORLD]\n"
        "for group in groups:\n    one = torch.tensor([1.0], device='cuda')\n"
        "    all_of_them = torch.zeros(group.size(), device='cuda')\n    dist.all_reduce(one, group=group)\n"
        "    dist.all_gather_into_tensor(all_of_them, one, group=group)\n    print(all_of_them.tolist())\n"
    )
    done = nullgpu("--world", 8, "python", script)
    assert done.stdout.split("\n")[:-1] == [str([float(n)] * n) for n in (2, 4, 3, 8)], done.stderr[-2000:]


@pytest.mark.thorough  # many processes
def test_batch_norm_has_the_values_of_the_cpu_on_one_gpu_and_over_two(nullgpu: Run) -> None:
    """cuDNN's batch norm on one, SyncBatchNorm on two, whose kernels PyTorch has for GPUs only."""
    script = str(HERE / "batch_norm.py")
    on_cpu = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [float(word) for word in on_cpu.stdout.split()]
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    for words in (["python", script], ["--gpus", "2", *launcher, script]):
        done = nullgpu("--values", *words)
        assert "no values" not in done.stderr
        assert [float(word) for word in done.stdout.split()] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.thorough
def test_layers_losses_and_optimizers_have_the_values_of_the_cpu(nullgpu: Run) -> None:
    done = nullgpu("--values", "python", str(HERE / "layers.py"), NULLGPU_STRICT="1")
    assert (done.status, done.stdout) == (0, ""), done.stderr[-3000:]


def test_sparse_tensors_have_the_values_of_the_cpu(nullgpu: Run) -> None:
    """Also what autograd adds up of them, and how optimizers use them."""
    done = nullgpu("--values", "python", str(HERE / "sparse.py"), NULLGPU_STRICT="1")
    assert (done.status, done.stdout) == (0, ""), done.stderr[-3000:]

"""How the ranks find each other: before a deadline, and with devices that fit; GPUs are fake."""

import importlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from conftest import REPOSITORY
from lab.launching import load_script
from workshop.distributed import failure_detector
from workshop.errors import UserError
from workshop.run.control_group import ControlGroup, backend_in_use

# The package has functions of the same names.
RENDEZVOUS = importlib.import_module("workshop.distributed.rendezvous")
DETECTOR = importlib.import_module("workshop.distributed.failure_detector")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store that all ranks get; they are threads of this process."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(RENDEZVOUS, "silent_stderr", nullcontext)  # stderr belongs to the whole process
    monkeypatch.setattr(RENDEZVOUS, "exit_2_on_sigterm", lambda: None)
    for name, value in {"MASTER_ADDR": "somewhere", "MASTER_PORT": "1", "WORKSHOP_RENDEZVOUS_SECONDS": "60"}.items():
        monkeypatch.setenv(name, value)
    return store


def all_join(*devices: torch.device, world_sizes: tuple[int, ...] = (2, 2)) -> list[UserError | None]:
    """The error that each rank gets; the ranks have these devices."""

    def join(rank: int) -> UserError | None:
        try:
            RENDEZVOUS.rendezvous(rank, world_sizes[rank], devices[rank])
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(join, range(len(devices))))


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str, name: str = "NVIDIA A100-SXM4-40GB") -> None:
    """Give the ranks, in the order in which they ask, GPUs with these UUIDs."""
    given = iter(uuids)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=next(given), name=name))


def test_ranks_on_cpus_join(store: dist.Store) -> None:
    assert all_join(CPU, CPU) == [None, None]


def test_ranks_that_disagree_on_their_number_say_so(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    monkeypatch.setenv("WORKSHOP_RENDEZVOUS_SECONDS", "2")
    first, second = all_join(CPU, CPU, world_sizes=(2, 3))
    assert str(first) == "the ranks disagree on their number, 2 or 3: check WORLD_SIZE"
    assert "rank 1 of 3 waited up to 2 s" in str(second)  # for a third rank, which nobody has started


class Seen(Exception):
    """What was to be seen has been seen."""


@pytest.mark.parametrize("lesson", ["03_ddp", "04_mixed_precision", "05_fully_sharded"])
@pytest.mark.parametrize(("gpus", "index"), [(1, 0), (2, 1)], ids=["srun shows each task its own", "two are visible"])
def test_the_gpu_of_a_local_rank(monkeypatch: pytest.MonkeyPatch, lesson: str, gpus: int, index: int) -> None:
    """If each task of srun sees only one GPU, it is number 0 for all; `rendezvous` finds out whether it is shared."""

    def see(rank: int, world_size: int, device: torch.device) -> dist.Store:
        raise Seen(rank, world_size, device)

    script = vars(load_script(REPOSITORY / lesson))
    monkeypatch.setitem(script["main"].__globals__, "rendezvous", see)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(Seen) as seen:
        script["main"](script["Config"]())
    assert seen.value.args == (3, 4, torch.device("cuda", index))


@pytest.mark.parametrize("uuids", [("GPU-a", "GPU-b"), ("GPU-a", "GPU-a")], ids=["its own", "the same"])
def test_each_task_of_srun_may_see_one_gpu_if_it_is_its_own(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, uuids: tuple[str, str]
) -> None:
    fake_gpus(monkeypatch, *uuids)
    errors = all_join(GPU, GPU)
    assert [error is None for error in errors] == [uuids[0] != uuids[1]] * 2


@pytest.mark.parametrize(
    ("devices", "lacking"),
    [((GPU, GPU), 1), ((GPU, CPU), 1), ((CPU, GPU), 0)],
    ids=["two share one", "the second has none", "the first has none"],
)
def test_a_rank_without_a_gpu_of_its_own_is_named_once(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, devices: tuple, lacking: int
) -> None:
    fake_gpus(monkeypatch, "GPU-a", "GPU-a")
    errors = all_join(*devices)
    assert [str(error).partition(" on ")[0] for error in errors] == [f"rank {lacking} finds no GPU of its own"] * 2
    assert sorted(error.already_reported for error in errors) == [False, True]


@pytest.mark.parametrize(
    ("visible", "fits"),
    [
        (("MIG-1", "MIG-2"), True),
        (("MIG-1,MIG-2", "MIG-1,MIG-2"), False),  # a process sees only the first one
        (("0", "0"), True),  # of each container: they cannot be compared
        (("", ""), True),
    ],
    ids=["a slice each", "the same slice", "by number", "by nothing"],
)
def test_slices_of_a_gpu_may_have_its_uuid(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, visible: tuple[str, str], fits: bool
) -> None:
    """The variable belongs to the whole process, so the identities of the ranks' GPUs are read one after the other."""
    fake_gpus(monkeypatch, "GPU-a", "GPU-a", name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    identities = []
    for rank, value in enumerate(visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        identities.append(RENDEZVOUS._gpu_identity(GPU, rank))
    monkeypatch.setattr(RENDEZVOUS, "_gpu_identity", lambda _, rank: identities[rank])
    errors = all_join(GPU, GPU)
    assert [error is None for error in errors] == [fits] * 2


NCCL_VARIABLES = ("TORCH_DIST_USE_NCCL2", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ({}, ("0", "20000", None)),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ("0", "20000", "1")),  # as under torchrun
        (dict(zip(NCCL_VARIABLES, ("1", "500", "3"), strict=True)), ("1", "500", "3")),
    ],
    ids=["srun", "torchrun", "the user's"],
)
@pytest.mark.parametrize("lesson", ["03_ddp", "04_mixed_precision", "05_fully_sharded"])
def test_the_nccl_settings_when_the_group_is_made(
    monkeypatch: pytest.MonkeyPatch, lesson: str, own: dict[str, str], seen: tuple[str | None, ...]
) -> None:
    """The former backend; and a watchdog that waits longer than the failure detector needs to name a failed rank."""
    for name in NCCL_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the script sets is undone
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    found = []

    def init(backend: str, **_: object) -> None:
        found.append((backend, *map(os.environ.get, NCCL_VARIABLES)))
        raise RuntimeError("enough was seen")

    script = vars(load_script(REPOSITORY / lesson))
    fake_gpus(monkeypatch, "GPU-a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(UserError, match="joined, but cannot reach the others: enough was seen"):
        script["main"](script["Config"]())
    assert found == [("nccl", *seen)]
    if "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC" not in own:
        noticed = DETECTOR.TIMEOUT + 3 * DETECTOR.PERIOD  # by rank 0; the others look once in a period
        assert 4 * float(seen[1]) / 1000 > 1.5 * noticed


def test_the_variable_selects_the_former_nccl() -> None:
    """Torch chooses when the name is used for the first time, so each case needs a process of its own."""
    script = """
import torch.distributed.distributed_c10d as c10d
from workshop.distributed.rendezvous import set_nccl_defaults
set_nccl_defaults()
getattr(c10d.Backend, "_ensure_backend_registered", str)("nccl")
creator = getattr(c10d.Backend._plugins.get("NCCL"), "creator_fn", None)
print(creator.__name__ if creator else "built in")
"""
    found = []
    for own in ({}, {"TORCH_DIST_USE_NCCL2": "1"}):
        environment = {name: value for name, value in os.environ.items() if name not in NCCL_VARIABLES} | own
        result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        found.append(result.stdout.strip())
    if found == ["built in"] * 2:
        pytest.skip("this torch has one NCCL backend only")
    assert found == ["_create_nccl_process_group", "_create_nccl2_process_group"]


def test_the_backend_in_use_is_named() -> None:
    assert backend_in_use(CPU) == {"backend": None, "backend_class": None}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert backend_in_use(CPU) == {"backend": "gloo", "backend_class": "ProcessGroupGloo"}
    finally:
        dist.destroy_process_group()


def test_ranks_that_cannot_connect_over_gloo_learn_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside NCCL it is the second group, and it needs an address that NCCL does not need."""

    def refuse(backend: str) -> None:
        assert backend == "gloo"
        raise RuntimeError("[enforce fail at device.cc:84] rp != nullptr.\nUnable to find address for: node7")

    monkeypatch.setattr(dist, "new_group", refuse)
    with pytest.raises(UserError, match=r"over gloo: .*address for: node7; the name of each node.*GLOO_SOCKET_IFNAME"):
        ControlGroup(0, 2)


@pytest.mark.parametrize("mistake", [UserError("no such data"), RuntimeError("a defect")], ids=["mistake", "defect"])
def test_a_mistake_over_nccl_is_one_line_though_the_group_is_not_destroyed(
    monkeypatch: pytest.MonkeyPatch, mistake: Exception
) -> None:
    """Torch warns of the group when the process ends, on the file descriptor that C++ writes to; here it is gloo's."""
    destroyed, at_exit = [], []
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    store = dist.HashStore()
    try:
        with pytest.raises(type(mistake)), failure_detector(store, 0, 1):
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            raise mistake
    finally:
        destroy()
    assert destroyed == []
    silenced = [call for call in at_exit if call[0] is os.dup2 and call[2] == 2]
    assert len(silenced) == isinstance(mistake, UserError)
    for _, nowhere, _ in silenced:
        assert os.fstat(nowhere).st_rdev == os.stat(os.devnull).st_rdev
        os.close(nowhere)


def test_the_whole_rendezvous_has_one_deadline(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    """It includes connecting, which may take longer than its own timeout."""
    over = threading.Event()

    def rendezvous(*_: object, **__: object) -> object:
        over.wait(20)
        return iter([(store, 0, 2)])

    store.set("info of rank 1", '[2, "node", ""]')
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    monkeypatch.setenv("WORKSHOP_RENDEZVOUS_SECONDS", "1")
    with pytest.raises(UserError, match="rank 0 of 2 waited up to 1 s at somewhere:1, but not all ranks joined"):
        RENDEZVOUS.rendezvous(0, 2, CPU)
    over.set()

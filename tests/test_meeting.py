"""How ranks meet: within one deadline, and with devices that fit; GPUs are pretended."""

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

from workshop.distributed import heartbeat, process_group
from workshop.distributed.agreement import Agreement, backend_in_use
from workshop.distributed.ranks import Ranks
from workshop.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """What all ranks meet at; they are threads of this process."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(process_group, "_silent_stderr", nullcontext)  # it belongs to the process
    monkeypatch.setattr(process_group, "leave_with_status_2_when_told_to_end", lambda: None)
    for name, value in {"MASTER_ADDR": "somewhere", "MASTER_PORT": "1", "WORKSHOP_RENDEZVOUS_SECONDS": "60"}.items():
        monkeypatch.setenv(name, value)
    return store


def all_meet(*devices: torch.device) -> list[UserError | None]:
    """What each rank, of these devices, is told."""

    def meet(rank: int) -> UserError | None:
        try:
            process_group.meet(Ranks(rank=rank, world_size=len(devices)), devices[rank])
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(meet, range(len(devices))))


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str, name: str = "NVIDIA A100-SXM4-40GB") -> None:
    """Give the ranks, in the order they ask, GPUs with these UUIDs."""
    given = iter(uuids)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=next(given), name=name))


def test_ranks_on_cpus_meet(store: dist.Store) -> None:
    assert all_meet(CPU, CPU) == [None, None]


@pytest.mark.parametrize("uuids", [("GPU-a", "GPU-b"), ("GPU-a", "GPU-a")], ids=["its own", "the same"])
def test_each_task_of_srun_may_see_one_gpu_if_it_is_its_own(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, uuids: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    pretend_gpus(monkeypatch, *uuids)
    errors = all_meet(*map(process_group._own_device, range(2)))
    assert [error is None for error in errors] == [uuids[0] != uuids[1]] * 2


@pytest.mark.parametrize(
    ("devices", "lacking"),
    [((GPU, GPU), 1), ((GPU, CPU), 1), ((CPU, GPU), 0)],
    ids=["two share one", "the second has none", "the first has none"],
)
def test_a_rank_without_a_gpu_of_its_own_is_named_once(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, devices: tuple, lacking: int
) -> None:
    pretend_gpus(monkeypatch, "GPU-a", "GPU-a")
    errors = all_meet(*devices)
    assert [str(error).partition(" on ")[0] for error in errors] == [f"rank {lacking} finds no GPU of its own"] * 2
    assert sorted(error.told for error in errors) == [False, True]


@pytest.mark.parametrize(
    ("visible", "fits"),
    [
        (("MIG-1", "MIG-2"), True),
        (("MIG-1,MIG-2", "MIG-1,MIG-2"), False),  # a process sees the first one only
        (("0", "0"), True),  # of each container: they cannot be compared
        (("", ""), True),
    ],
    ids=["a slice each", "the same slice", "by number", "by nothing"],
)
def test_slices_of_a_gpu_may_have_its_uuid(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, visible: tuple[str, str], fits: bool
) -> None:
    """The variable belongs to the process, so the ranks ask for the identities of their GPUs one after the other."""
    pretend_gpus(monkeypatch, "GPU-a", "GPU-a", name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    identities = []
    for rank, value in enumerate(visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        identities.append(process_group._gpu_identity(GPU, rank))
    monkeypatch.setattr(process_group, "_gpu_identity", lambda _, rank: identities[rank])
    errors = all_meet(GPU, GPU)
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
def test_what_nccl_is_told_when_the_group_is_made(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], seen: tuple[str | None, ...]
) -> None:
    """The former backend; and a watchdog that waits longer than it takes the heartbeats to name a rank that failed."""
    for name in NCCL_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the group sets is undone
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    found = []

    def init(backend: str, **_: object) -> None:
        found.append((backend, *map(os.environ.get, NCCL_VARIABLES)))
        raise RuntimeError("enough was seen")

    pretend_gpus(monkeypatch, "GPU-a")
    monkeypatch.setattr(process_group, "_own_device", lambda _: GPU)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(UserError, match="enough was seen"), process_group.process_group():
        pass
    assert found == [("nccl", *seen)]
    if "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC" not in own:
        noticed = heartbeat.SILENCE + 3 * heartbeat.PERIOD  # by rank 0; the others look once in a period
        assert 4 * float(seen[1]) / 1000 > 1.5 * noticed


def test_the_variable_selects_the_former_nccl() -> None:
    """Torch chooses in the moment in which the name is used first, so each case is a process of its own."""
    script = """
import torch.distributed.distributed_c10d as c10d
from workshop.distributed.process_group import set_nccl_defaults
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


def test_ranks_that_cannot_meet_over_gloo_are_told_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside NCCL it is the second group, and wants an address that NCCL did not ask for."""

    def refuse(backend: str) -> None:
        assert backend == "gloo"
        raise RuntimeError("[enforce fail at device.cc:84] rp != nullptr.\nUnable to find address for: node7")

    monkeypatch.setattr(dist, "new_group", refuse)
    with pytest.raises(UserError, match=r"over gloo: .*address for: node7; the name of each node.*GLOO_SOCKET_IFNAME"):
        Agreement(Ranks(rank=0, world_size=2))


@pytest.mark.parametrize("mistake", [UserError("no such data"), RuntimeError("a defect")], ids=["mistake", "defect"])
def test_a_mistake_over_nccl_is_one_line_though_the_ranks_do_not_part(
    monkeypatch: pytest.MonkeyPatch, mistake: Exception
) -> None:
    """Torch warns of that when the process ends, on the descriptor that C++ writes to; the group is gloo's here."""
    parted, at_exit = [], []
    part = dist.destroy_process_group
    monkeypatch.setattr(process_group, "_own_device", lambda _: GPU)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a", name="A100"))
    init = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda _, device_id, **where: init("gloo", **where))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: parted.append(True))
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    try:
        with pytest.raises(type(mistake)), process_group.process_group():
            raise mistake
    finally:
        part()
    assert parted == []
    silenced = [call for call in at_exit if call[0] is os.dup2 and call[2] == 2]
    assert len(silenced) == isinstance(mistake, UserError)
    for _, nowhere, _ in silenced:
        assert os.fstat(nowhere).st_rdev == os.stat(os.devnull).st_rdev
        os.close(nowhere)


def test_all_of_the_meeting_has_one_deadline(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    """Connecting, which takes as long as it is told to, and then some more, ends with it."""
    over = threading.Event()

    def rendezvous(*_: object, **__: object) -> object:
        over.wait(20)
        return iter([(store, 0, 2)])

    store.set("card of rank 1", '[2, "node", ""]')
    store.set("world size of rank 1", "2")
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    monkeypatch.setenv("WORKSHOP_RENDEZVOUS_SECONDS", "1")
    with pytest.raises(UserError, match="rank 0 of 2 waited up to 1 s at somewhere:1, but not all came"):
        process_group.meet(Ranks(rank=0, world_size=2), CPU)
    over.set()

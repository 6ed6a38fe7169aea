"""The scripts of the pages "In your own script": they run, do what the pages say, and are what the pages show."""

import ast
import json
import math
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

from conftest import REPOSITORY, run_as_script
from lab import render, render_own
from ranks import start_ranks

SCRIPTS = [(lesson, name) for lesson, steps in render_own.STEPS.items() for name in steps]
STEPS = [(lesson, step) for lesson, steps in render_own.STEPS.items() for step in steps[1:]]
PAGES = [REPOSITORY / lesson / "in_your_own_script.md" for lesson in render_own.STEPS]
NUMBER = r"[\d.,]+"
EPOCH = rf"epoch (\d+)  loss ({NUMBER})  accuracy ({NUMBER})%  {NUMBER} s"
DDP = "03_ddp"
SHARDED = "05_fully_sharded"
PRECISION = "04_mixed_precision"


def file_of(lesson: str, name: str) -> Path:
    return REPOSITORY / lesson / "own_script" / f"{name}.py"


def lesson_of(page: Path) -> str:
    return page.parent.name


class FewSamples:
    """Takes the place of Stripes.__init__: a data set an eighth as large, so that an epoch takes a moment."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, dataset: object, size: int, first_seed: int) -> None:
        self.made += 1
        dataset.size, dataset.first_seed = math.ceil(size / 8), first_seed


Alone = Callable[..., str]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture) -> Alone:
    """Runs a script in this process, in a folder of its own, on few samples; returns what it prints."""

    def run(lesson: str, name: str, *arguments: object) -> str:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for steps as small as these, more threads mostly wait for each other
        with monkeypatch.context() as patch:
            for module in ("workshop", "lab"):  # as where they are not installed
                patch.setitem(sys.modules, module, None)
            for variable in [v for v in os.environ if v.startswith("SLURM_") or v in ("RANK", "WORLD_SIZE")]:
                patch.delenv(variable)
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
            patch.syspath_prepend(file_of(lesson, name).parent)
            patch.delitem(sys.modules, "stripes", raising=False)
            import stripes

            few = FewSamples()
            patch.setattr(stripes.Stripes, "__init__", lambda self, *args, **kwargs: few(self, *args, **kwargs))
            capfd.readouterr()
            run_as_script(file_of(lesson, name), patch)
        torch.set_num_threads(threads)
        assert few.made == 2
        return capfd.readouterr().out

    return run


def epochs_in(output: str) -> list[tuple[int, float, float]]:
    """The epochs that a run has printed: number, loss, accuracy."""
    found = re.findall(rf"^{EPOCH}$", output, re.MULTILINE)
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in found]


# The files


@pytest.mark.parametrize(("lesson", "name"), SCRIPTS)
def test_a_script_imports_only_pytorch(lesson: str, name: str) -> None:
    for file in (file_of(lesson, name), file_of(lesson, "stripes")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                roots = {name.partition(".")[0] for name in names}
                assert roots <= {"torch", "line_profiler", "stripes"} | sys.stdlib_module_names, file


def test_the_files_of_one_lesson_are_those_of_the_others() -> None:
    """Each folder can be copied alone, and the pages build on each other."""
    assert len({file_of(lesson, "stripes").read_text() for lesson in render_own.STEPS}) == 1
    assert len({file_of(lesson, "plain").read_text() for lesson in render_own.STEPS if lesson != SHARDED}) == 1
    assert file_of(SHARDED, "ddp").read_text() == file_of(DDP, "step1_ddp").read_text()
    for lesson, steps in render_own.STEPS.items():
        assert {file.stem for file in (REPOSITORY / lesson / "own_script").glob("*.py")} == {*steps, "stripes"}


def test_the_script_to_begin_with_is_short() -> None:
    assert 40 <= len(file_of(DDP, "plain").read_text().splitlines()) <= 80


# The pages


@pytest.mark.parametrize(("lesson", "step"), STEPS)
def test_a_page_shows_all_that_a_step_changes(lesson: str, step: str) -> None:
    page = (REPOSITORY / lesson / "in_your_own_script.md").read_text()
    changed = render_own.changed(lesson, step)
    assert changed
    for name, hunks in changed.items():
        assert all(hunk in page for hunk in hunks), name
    before = render.definitions_in(file_of(lesson, render_own.former(lesson, step)))
    after = render.definitions_in(file_of(lesson, step))
    assert all(f"`{name}`" in page for name in before.keys() - after.keys()), "no hunk shows what was deleted"


@pytest.mark.parametrize("page", PAGES, ids=lesson_of)
def test_a_page_says_what_would_happen_without_a_change(page: Path) -> None:
    lesson = lesson_of(page)
    sections = re.split(r"^## Step \d.*$", page.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == len(render_own.STEPS[lesson]) - 1
    assert all(len(re.findall(r"\*[Ii]f\s|if you forget", section)) >= 2 for section in sections)


@pytest.mark.parametrize("page", PAGES, ids=lesson_of)
def test_the_lesson_links_to_the_page(page: Path) -> None:
    assert "(in_your_own_script.md)" in (page.parent / "README.md").read_text()


def shown_outputs(page: Path) -> list[str]:
    """Patterns of the outputs that a page shows, where `...` stands for a number or a device."""
    blocks = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [re.escape(b).replace(r"\.\.\.", r" *[\w.,:]+") for b in blocks if "# not tested" not in b]


# What they print, in one process


@pytest.mark.parametrize(("lesson", "name"), SCRIPTS)
def test_a_script_runs_alone(lesson: str, name: str, alone: Alone, tmp_path: Path) -> None:
    arguments = ["--workers", 0] if "workers" in file_of(lesson, name).read_text() else []
    (_, first, _), (_, second, _) = epochs_in(alone(lesson, name, "--epochs", 2, "--batch_size", 16, *arguments))
    assert second < first
    assert list(tmp_path.iterdir())  # what it has saved


def test_the_network_learns(alone: Alone) -> None:
    """What the page's reader sees, on an eighth of the samples."""
    *_, (_, loss, accuracy) = epochs_in(alone(DDP, "plain", "--epochs", 6, "--batch_size", 16))
    assert loss < 1.0
    assert accuracy > 60


def test_what_lesson_01_prints(alone: Alone) -> None:
    three, timers, benchmark = shown_outputs(PAGES[0])
    options = ("--batch_size", 32, "--epochs")
    assert re.fullmatch(three, alone("01_single_gpu", "plain", *options, 3))
    assert re.fullmatch(timers, alone("01_single_gpu", "step1_measure", *options, 1, "--timers"))
    assert re.fullmatch(benchmark, alone("01_single_gpu", "step2_bottleneck", *options, 1, "--benchmark"))


def test_an_epoch_with_too_few_batches_is_not_measured(alone: Alone) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(AssertionError, match="too few batches"):
        alone("01_single_gpu", "step2_bottleneck", "--batch_size", 128, "--benchmark")
    torch.set_num_threads(threads)


def test_loading_differently_changes_no_loss(alone: Alone) -> None:
    losses = [epochs_in(alone("01_single_gpu", name, "--epochs", 1)) for name in render_own.STEPS["01_single_gpu"][:3]]
    for name in ("step3_loader", "step4_nvtx"):
        losses.append(epochs_in(alone("01_single_gpu", name, "--epochs", 1, "--workers", 0)))
    assert all(found == losses[0] for found in losses)


@pytest.mark.slow
def test_workers_change_no_loss_of_the_first_epoch(alone: Alone) -> None:
    losses = [epochs_in(alone("01_single_gpu", "step3_loader", "--epochs", 1, "--workers", n)) for n in (0, 2)]
    assert losses[0] == losses[1]


def test_options_of_lesson_04_in_float32_change_no_loss(alone: Alone) -> None:
    plain = epochs_in(alone(PRECISION, "plain", "--epochs", 1))
    for step in ("step1_bf16", "step2_fp16", "step3_fast"):
        assert epochs_in(alone(PRECISION, step, "--epochs", 1)) == plain
    for precision in ("bf16", "fp16"):
        output = alone(PRECISION, "step3_fast", "--epochs", 1, "--precision", precision, "--channels_last", "--fused")
        ((_, loss, _),) = epochs_in(output)
        assert loss == pytest.approx(plain[0][1], rel=0.02)
        assert ("scale" in output) == (precision == "fp16")
    assert re.fullmatch(
        shown_outputs(PAGES[2])[0], alone(PRECISION, "step2_fp16", "--epochs", 1, "--precision", "fp16")
    )


# What the pages say about number formats and options


def test_autocast_computes_in_16_bits_and_keeps_weights_and_loss() -> None:
    script = namespace(PRECISION, "step2_fp16")
    model, images = script["Net"](), torch.randn(4, 3, 32, 32)
    for precision, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.items():
        with script["autocast"](precision, torch.device("cpu")):
            outputs = model(images)
            loss = F.cross_entropy(outputs, torch.arange(4))
        assert (outputs.dtype, loss.dtype, model.head.weight.dtype) == (dtype, torch.float32, torch.float32)


def test_clipping_scaled_gradients_leaves_nearly_nothing() -> None:
    """What happens without `scaler.unscale_`, with gradients that are smaller than the limit of clipping."""
    norms = {}
    for unscale in (True, False):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale((weight * torch.tensor([0.3, 0.4])).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        norms[unscale] = torch.nn.utils.clip_grad_norm_([weight], 1.0).item()
        scaler.step(optimizer)
        assert weight.norm().item() == pytest.approx(0.5 if unscale else 1 / 65536, rel=1e-3)
    assert norms[True] == pytest.approx(0.5)
    assert norms[False] == pytest.approx(0.5 * 65536)


def test_convolutions_keep_channels_last() -> None:
    model = namespace(PRECISION, "step3_fast")["Net"]().to(memory_format=torch.channels_last)
    seen = []
    model.blocks[-1].register_forward_hook(lambda *call: seen.append(call[-1]))
    model(torch.randn(4, 3, 32, 32))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_the_optimizer_takes_fused_from_a_checkpoint() -> None:
    def optimizer(fused: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], fused=fused)

    loaded = optimizer(True)
    loaded.load_state_dict(optimizer(False).state_dict())
    assert not loaded.param_groups[0]["fused"]


@pytest.mark.slow
def test_compilation_changes_no_loss(alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the tracer of torch.compile, and without its compiler of C++, which takes a minute."""
    compiled = []

    def compile_eagerly(model: torch.nn.Module, *, dynamic: bool) -> torch.nn.Module:
        assert not dynamic
        compiled.append(original(model, backend="eager"))
        return compiled[-1]

    original = torch.compile
    plain = epochs_in(alone(PRECISION, "plain", "--epochs", 1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", compile_eagerly)
        ((_, loss, accuracy),) = epochs_in(alone(PRECISION, "step3_fast", "--epochs", 1, "--compile"))
    assert loss == pytest.approx(plain[0][1], abs=2e-4)
    assert accuracy == pytest.approx(plain[0][2], abs=2)
    saved = torch.load(tmp_path / "model.pt")
    assert "stem.weight" in saved
    assert "_orig_mod.stem.weight" in compiled[0].state_dict()


# What the pages say about ranks


def namespace(lesson: str, name: str) -> dict:
    """The definitions of a script, without running its main."""
    folder = str(file_of(lesson, name).parent)
    sys.path.insert(0, folder)
    try:
        sys.modules.pop("stripes", None)
        return runpy.run_path(str(file_of(lesson, name)), run_name="own_script")
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 1, 4)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}, (3, 1, 4)),
        # torchrun, started by srun
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            (3, 1, 4),
        ),
        # a job file without srun
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}, (0, 0, 1)),
        ({}, (0, 0, 1)),
    ],
)
def test_a_rank_is_found_in_the_environment(
    variables: dict[str, str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_") or name.endswith(("RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for script in render_own.STEPS[DDP][1:]:
        assert namespace(DDP, script)["ranks_from_env"]() == expected


def test_a_missing_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")  # so that what the script sets is undone
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected, but not set"):
        namespace(DDP, "step1_ddp")["join_ranks"]()


@pytest.mark.parametrize(("own", "seen"), [(None, "0"), ("1", "1")], ids=["default", "the user's"])
def test_the_older_nccl_backend_is_selected(monkeypatch: pytest.MonkeyPatch, own: str | None, seen: str) -> None:
    name = "TORCH_DIST_USE_NCCL2"
    found = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: found.append(os.environ.get(name)))
    for lesson, scripts in ((DDP, render_own.STEPS[DDP][1:]), (SHARDED, render_own.STEPS[SHARDED])):
        for script in scripts:
            with monkeypatch.context() as patch:
                patch.setenv(name, own or "")  # so that what the script sets is undone
                if own is None:
                    patch.delenv(name)
                namespace(lesson, script)["join_ranks"]()
    assert found == [seen] * 7


def test_without_set_epoch_each_epoch_has_the_same_order() -> None:
    sampler = DistributedSampler(range(21), 2, 0, shuffle=True, seed=1, drop_last=True)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert first == again != list(sampler)
    other = DistributedSampler(range(21), 2, 1, shuffle=True, seed=1, drop_last=True)
    other.set_epoch(1)
    assert len({*sampler} | {*other}) == len([*sampler, *other]) == 20


def test_the_prefix_of_a_wrapper_can_be_removed() -> None:
    state = torch.nn.DataParallel(torch.nn.Linear(2, 2)).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        torch.nn.Linear(2, 2).load_state_dict(state)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    torch.nn.Linear(2, 2).load_state_dict(state)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What two ranks find; see own_script_facts.py."""
    script = REPOSITORY / "tests" / "own_script_facts.py"
    results = start_ranks(2, script, REPOSITORY, cwd=tmp_path_factory.mktemp("facts"))
    assert [result.status for result in results] == [0, 0], "".join(result.stderr for result in results)
    return json.loads(results[0].stdout.splitlines()[-1])


@pytest.mark.parametrize("script", ["ddp", "accumulate", "remainder", "shard", "meta", "recompute"])
def test_two_ranks_train_what_one_process_trains(script: str, found: dict) -> None:
    """`plain.py` with the same samples in each step; here gradients are clipped, as the norm of the last ones shows."""
    assert found["norm"] == pytest.approx(1.0, abs=1e-3)
    results = found[script]
    assert results["same on all ranks"]
    assert (results["gradients"] is None) == (script in ("accumulate", "remainder"))
    assert max(results[name] or 0 for name in ("loss", "gradients", "weights", "accuracy")) < 1e-4


def test_bf16_changes_little(found: dict) -> None:
    assert found["bf16"]["same on all ranks"]
    assert 0 < found["bf16"]["weights"] < 0.2
    assert found["bf16"]["loss"] < 0.1


def test_gradients_are_sent_once_for_each_update(found: dict) -> None:
    assert found["all-reduces"] == 3
    assert found["all-reduces with remainder"] == 2
    assert found["all-reduces without no_sync"] == 6, "the page says that only this differs"
    assert found["forgotten no_sync"]["weights"] < 1e-4


def test_each_rank_stores_a_part(found: dict) -> None:
    assert found["parts"] == [[4, 3, 5, 5], [4]]  # of 8 channels


def test_what_happens_if_the_order_of_sharding_is_forgotten(found: dict) -> None:
    assert found["change by an optimizer that is too early"] == 0
    assert found["unequal seeds"] == pytest.approx([0, 0, 1, 1]), (
        "rank 1's part of the weights is that of another model"
    )


# Whole runs of two ranks


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    """Copies the scripts of a lesson to a place where only they are, with a data set an eighth as large."""

    def copy(lesson: str) -> Path:
        folder = tmp_path / lesson
        shutil.copytree(REPOSITORY / lesson / "own_script", folder)
        stripes = (folder / "stripes.py").read_text()
        assert "self.size = size\n" in stripes
        (folder / "stripes.py").write_text(stripes.replace("self.size = size\n", "self.size = size // 8\n"))
        return folder

    return copy


def run_ranks(count: int, folder: Path, *command: object) -> str:
    """What the ranks print, rank 0 first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    results = start_ranks(count, *command, cwd=folder, environment=environment)
    assert {result.status for result in results} == {0}, "".join(result.stderr for result in results)
    return "".join(result.stdout for result in results)


@pytest.mark.slow
def test_what_the_page_of_lesson_03_prints(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(DDP)
    output = run_ranks(2, folder, "step1_ddp.py", "--batch_size", 32)
    lines = sorted(output.splitlines(keepends=True), key=lambda line: not line.startswith("rank"))
    assert re.fullmatch(shown_outputs(PAGES[1])[0], "".join(lines))
    alone = run_ranks(1, folder, "step1_ddp.py", "--epochs", 1, "--batch_size", 64)
    accumulated = run_ranks(2, folder, "step2_accumulate.py", "--epochs", 1, "--batch_size", 16, "--accumulate", 2)
    for other in (alone, accumulated):
        assert epochs_in(other)[0][1] == pytest.approx(epochs_in(output)[0][1], abs=1e-3)


@pytest.mark.slow
def test_a_ddp_run_continues(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(DDP)
    one, two = epochs_in(run_ranks(2, folder, "step3_resume.py", "--epochs", 2))
    assert epochs_in(run_ranks(2, folder, "step3_resume.py", "--epochs", 1)) == [one]
    assert epochs_in(run_ranks(2, folder, "step3_resume.py", "--epochs", 2, "--resume")) == [two]
    checkpoint = torch.load(folder / "checkpoint.pt")
    assert checkpoint["epoch"] == 2
    namespace(DDP, "plain")["Net"]().load_state_dict(checkpoint["model"])
    assert not (folder / "checkpoint.pt.new").exists()
    continued = run_ranks(1, folder, "step3_resume.py", "--epochs", 3, "--resume")
    assert [epoch for epoch, _, _ in epochs_in(continued)] == [3]


@pytest.mark.slow
def test_a_sharded_run_continues_on_any_number_of_ranks(folder_of: Callable[[str], Path]) -> None:
    folder, ddp = folder_of(SHARDED), folder_of(DDP)
    one, two = epochs_in(run_ranks(2, folder, "step3_checkpoint.py", "--epochs", 2))
    assert one[1] == pytest.approx(epochs_in(run_ranks(2, ddp, "step1_ddp.py", "--epochs", 1))[0][1], abs=2e-4)
    shutil.rmtree(folder / "checkpoints" / "epoch_2")
    (folder / "checkpoints" / "epoch_3").mkdir()  # a save that was interrupted: no .metadata
    assert epochs_in(run_ranks(2, folder, "step3_checkpoint.py", "--epochs", 2, "--resume")) == [two]
    shutil.rmtree(folder / "checkpoints" / "epoch_2")
    ((epoch, loss, _),) = epochs_in(
        run_ranks(1, folder, "step3_checkpoint.py", "--epochs", 2, "--resume", "--batch_size", 128)
    )
    assert (epoch, loss) == (2, pytest.approx(two[1], abs=1e-3))


@pytest.mark.slow
def test_sharded_weights_get_into_one_file(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(SHARDED)
    run_ranks(2, folder, "step1_shard.py", "--epochs", 1)
    whole = torch.load(folder / "model.pt")
    run_ranks(2, folder, "step3_checkpoint.py", "--epochs", 1)
    runpy_arguments = [
        "-m",
        "torch.distributed.checkpoint.format_utils",
        "dcp_to_torch",
        "checkpoints/epoch_1",
        "whole.pt",
    ]
    run_ranks(1, folder, *runpy_arguments)
    converted = torch.load(folder / "whole.pt", weights_only=False)["model"]
    assert whole.keys() == converted.keys()
    assert all(torch.allclose(weight, converted[name], atol=1e-6) for name, weight in whole.items())
    namespace(SHARDED, "ddp")["Net"]().load_state_dict(whole)

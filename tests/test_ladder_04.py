"""The measurements of lesson 04: step-by-step comparison, gradient underflow, tensor cores, and the score of a run."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ladder
from conftest import Script
from gradients import (
    EXPONENTS,
    collect_gradients,
    histogram,
    lost_weight_gradients,
    scaled_shares,
)
from matrix_peak import calls_per_wait, matmul_tflops, matrix_peak
from precision_ladder import (
    DEFAULT_SWITCHES,
    NAMES,
    SHARED,
    _throughputs,
    _write,
    compare,
    measure,
    missing,
    options_of,
    prepare,
    reset_switches,
)
from tensor_memory import peak_bytes_on_cpu
from trainer import Trainer, batches_of, errors_of, flops_per_sample, reference
from workload import LESSON, WorkloadConfig
from workshop.errors import UserError
from workshop.loaders import DistributedBatchSampler
from workshop.models.mnist_cnn import MnistCNN
from workshop.models.unet3d import UNet3D

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class Digits:
    """A loader of random digits in batches of 4; the last has 2."""

    def __init__(self) -> None:
        self.dataset = range(10)
        self.batch_sampler = DistributedBatchSampler(10, 4, seed=1, shuffle=True)
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(10, 1, 28, 28, generator=generator)
        self.labels = torch.arange(10)

    def __iter__(self) -> object:
        return ((self.images[batch], self.labels[batch]) for batch in self.batch_sampler.batches())


@pytest.mark.thorough
def test_the_comparison_measures_every_configuration(run_script: Script, tmp_path: Path) -> None:
    result = run_script("04_mixed_precision/experiments/ladder.py", "--quick", "true", "--out", tmp_path)
    assert result.status == 0, result.stderr
    assert result.stderr == ""
    results = json.loads((tmp_path / "ladder.json").read_text())
    rows = {row["name"]: row for row in results["rows"]}
    plain = ["fp32", "tf32", DEFAULT_SWITCHES, "fp16", "bf16"]
    more = ["+ channels_last", "+ cudnn_benchmark", "+ fused", "+ compile", "+ cuda_graph"]
    assert list(rows) == [*plain, *more]
    lacking = {name for name, row in rows.items() if row["note"].startswith("not available: ")}
    assert lacking == {"tf32", DEFAULT_SWITCHES, "+ cudnn_benchmark", "+ compile", "+ cuda_graph"}
    for name, row in rows.items():
        assert (name in result.stdout) and (row["samples_per_second"] is None) == (name in lacking)
        if name not in lacking:
            flops = row["samples_per_second"] * results["flops_per_sample"]
            assert row["tflops"] == pytest.approx(flops / 1e12)
            assert row["share_of_peak"] == pytest.approx(row["tflops"] / max(results["peaks"].values()))
            assert row["val_loss"] == pytest.approx(rows["fp32"]["val_loss"], rel=0.05)
            assert row["peak_memory_bytes"] > 0
    assert rows["fp32"]["gradient_error"] < 1e-4 < rows["fp16"]["gradient_error"] < rows["bf16"]["gradient_error"] < 0.1
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    assert results["hardware"]["device"] == "cpu" and "unfinished" not in results
    assert set(tmp_path.iterdir()) == {tmp_path / "ladder.json", tmp_path / "ladder.png"}


class Processes:
    """In place of the processes that measure: notes which are started, and leaves made-up files."""

    def __init__(self, folder: Path, failing: tuple[str, ...] = (), lacking: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.failing = failing
        self.shared = dict.fromkeys(("hardware", "reference"), "") | {"flops_per_sample": 2e9, "batch_size": 4}
        self.shared |= {"peaks": {"fp32": 1.0}, "left_out": dict.fromkeys(lacking, "the device lacks it")}
        self.started: list[str] = []

    def __call__(self, name: str) -> str:
        self.started.append(name)
        if name in self.failing:
            return "RuntimeError: out of luck"
        if name == SHARED:
            _write(self.folder, SHARED, self.shared)
        else:
            rates = {"samples_per_second": 100.0, "samples_per_second_std": 1.0}
            _write(self.folder, "configuration", {"name": name} | rates)
        return ""


def test_each_configuration_has_a_process_of_its_own_and_is_there_at_once(tmp_path: Path) -> None:
    processes = Processes(tmp_path, lacking=("tf32", DEFAULT_SWITCHES))
    available = [name for name in NAMES if name not in ("tf32", DEFAULT_SWITCHES)]
    found = []
    for figures in compare(tmp_path, processes):
        measured = [row["name"] for row in figures["rows"] if not row["note"]]
        done = len(measured) == len(available) and "repeated" in figures
        assert figures.get("unfinished", False) == (not done)
        assert processes.started == [SHARED, *measured, *(["bf16"] if done else [])]
        found.append(len(measured))
    assert found == [*range(1, len(available) + 1), len(available)]
    assert figures["repeated"]["name"] == "bf16"
    assert (figures["rows"][0]["tflops"], figures["rows"][0]["share_of_peak"]) == (0.2, 0.2)


def test_a_configuration_that_fails_is_reported_and_its_option_left_out(tmp_path: Path) -> None:
    processes = Processes(tmp_path, failing=("fp16", "+ compile"))
    *_, figures = compare(tmp_path, processes, repeated=False)
    notes = {row["name"]: row["note"] for row in figures["rows"] if row["note"]}
    assert notes == dict.fromkeys(("fp16", "+ compile"), "failed: RuntimeError: out of luck")
    assert processes.started == [SHARED, *NAMES]
    assert not {"unfinished", "repeated"} & set(figures)
    left_out = json.loads((tmp_path / f"{SHARED}.json").read_text())["left_out"]
    assert options_of("+ cuda_graph", WorkloadConfig(), left_out).compile == "off"
    with pytest.raises(UserError, match="out of luck"):
        next(compare(tmp_path, Processes(tmp_path, failing=(SHARED,))))


def test_the_file_is_whole_after_every_configuration(
    run_script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody sees it who stops the run, here with an exception that nobody expects."""
    processes: list[Processes] = []

    def start(script: list[str], **_: object) -> SimpleNamespace:
        folder, name = Path(script[-3]), script[-1]  # ... --out FOLDER --configuration NAME
        processes[:] = processes or [Processes(folder)]
        if name == "fp16":
            raise MemoryError
        processes[0](name)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("this process took a GPU"))
    with pytest.raises(MemoryError):
        run_script("04_mixed_precision/experiments/ladder.py", "--quick", "true", "--out", tmp_path)
    results = json.loads((tmp_path / "ladder.json").read_text())
    assert results["unfinished"] is True
    assert [row["name"] for row in results["rows"]] == ["fp32", "tf32", DEFAULT_SWITCHES]


def test_sigterm_ends_the_process_that_measures() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), ladder.ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_configurations_add_one_option_each_to_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LESSON.check_options.__globals__, "check_compiler", lambda _: None)
    config = WorkloadConfig(batch_size=7)
    lacking = missing(config, CPU)
    assert set(lacking) == {"tf32", DEFAULT_SWITCHES, "+ cudnn_benchmark", "+ cuda_graph"}
    assert "needs an NVIDIA GPU" in lacking["+ cuda_graph"]
    options = {name: options_of(name, config, lacking) for name in NAMES if name not in lacking}
    assert options["fp16"] == WorkloadConfig(batch_size=7, precision="fp16")
    assert options["+ channels_last"] == WorkloadConfig(batch_size=7, precision="bf16", channels_last=True)
    assert options["+ compile"] == WorkloadConfig(
        batch_size=7, precision="bf16", channels_last=True, fused=True, compile="default"
    )
    assert options_of("+ fused", config, ("bf16",)).precision == "fp32"
    assert "+ compile" in missing(config, CPU, compiled=False)


def test_one_configuration_has_the_switches_with_which_torch_is_imported() -> None:
    assert options_of(DEFAULT_SWITCHES, WorkloadConfig(), ()) == WorkloadConfig()
    switches = "[b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32, b.cudnn.conv.fp32_precision, b.cudnn.benchmark]"
    fresh = subprocess.run(
        [sys.executable, "-c", f"from torch import backends as b; print({switches})"], capture_output=True, text=True
    )
    trainer = Trainer(WorkloadConfig(), MnistCNN(), CPU, set_switches=reset_switches)
    LESSON.set_precision("fp32", cudnn_benchmark=True)
    trainer.train(iter([]))
    assert fresh.stdout == f"{eval(switches, {'b': torch.backends})}\n"
    assert torch.get_float32_matmul_precision() == "highest"
    LESSON.set_precision("fp32", cudnn_benchmark=False)


def test_no_other_configuration_has_them(monkeypatch: pytest.MonkeyPatch, data_dir: Path, tmp_path: Path) -> None:
    found = []

    def note(*_: object) -> tuple[float, float]:
        found.append(torch.backends.cudnn.allow_tf32)
        return 0.0, 0.0

    monkeypatch.setattr("precision_ladder.matrix_peak", lambda *_: 1.0)
    monkeypatch.setattr("precision_ladder.errors_of", note)
    monkeypatch.setattr("precision_ladder._peak_on_cpu", lambda *_: 0)
    monkeypatch.setattr("precision_ladder._throughputs", lambda *_: [1.0, 1.0])
    monkeypatch.setattr("precision_ladder.missing", lambda *_: {})
    config = WorkloadConfig(data_dir=data_dir, loader="memory", batch_size=4, limit_train=8, limit_val=8)
    prepare(config, CPU, tmp_path)
    for name in ("fp32", DEFAULT_SWITCHES, "bf16"):
        measure(name, config, CPU, tmp_path, steps=1, trials=2, seconds=0.001)
    assert found == [False, True, False]


def test_without_a_reference_only_the_errors_are_missing(
    monkeypatch: pytest.MonkeyPatch, data_dir: Path, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    monkeypatch.setattr("precision_ladder.reference", fail)
    monkeypatch.setattr("precision_ladder.missing", lambda *_: dict.fromkeys(NAMES[1:], "left out"))
    monkeypatch.setattr("precision_ladder.matrix_peak", lambda *_: 1.0)
    config = WorkloadConfig(data_dir=data_dir, loader="memory", batch_size=4, limit_train=8, limit_val=8)

    def run(name: str) -> str:
        if name == SHARED:
            prepare(config, CPU, tmp_path)
        else:
            measure(name, config, CPU, tmp_path, steps=1, trials=2, seconds=0.001)
        return ""

    *_, figures = compare(tmp_path, run)
    assert figures["rows"][0]["output_error"] is None and figures["rows"][0]["samples_per_second"] > 0
    assert "unable to find an engine" in ladder.table(figures)
    ladder.plot(figures | {"steps": 1}, tmp_path / "plot.png")


def test_a_graph_is_recorded_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, before = [], []

    def fewest(*_: object, first: int) -> int:
        before.append(len(trained))
        return first

    monkeypatch.setattr("precision_ladder.repeats_for", fewest)
    trainer = SimpleNamespace(config=WorkloadConfig(cuda_graph=True), device=CPU, train=trained.extend)
    _throughputs(trainer, (torch.zeros(4), torch.zeros(4)), trials=1, seconds=1.0)
    assert before[0] > LESSON.GraphedStep.EAGER_STEPS


def test_a_trainer_makes_the_steps_of_a_plain_training_loop() -> None:
    loader = Digits()
    torch.manual_seed(0)
    model = MnistCNN()
    trainer = Trainer(WorkloadConfig(lr=0.01), model, CPU)
    trainer.train(batches_of(loader, 3))
    plain = MnistCNN().eval()  # without dropout
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    batches = list(batches_of(loader, 3))
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(images), labels).backward()
        optimizer.step()
    for mine, theirs in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [len(labels) for _, labels in batches] == [4, 4, 4]  # the small batches are left out
    loss = nn.functional.cross_entropy(plain(loader.images), loader.labels).item()
    assert trainer.validate(loader) == pytest.approx(loss, rel=1e-4)


def test_a_trainer_has_the_memory_format_of_its_configuration() -> None:
    images = Trainer(WorkloadConfig(channels_last=True), MnistCNN(), CPU).model.conv2.weight
    config = WorkloadConfig(dataset="nbody", model="unet3d", unet_width=2, unet_depth=1, channels_last=True)
    volumes = Trainer(config, UNet3D(width=2, depth=1), CPU).model.down[0].weight
    assert images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    assert volumes.is_contiguous(memory_format=torch.channels_last_3d) and not volumes.is_contiguous()
    assert Trainer(WorkloadConfig(), MnistCNN(), CPU).model.conv2.weight.is_contiguous()


def test_errors_are_relative_to_float64() -> None:
    loader = Digits()
    torch.manual_seed(0)
    model = MnistCNN()
    batch = next(batches_of(loader, 1))
    truth = reference(model, *batch)
    assert truth[0].dtype == truth[1].dtype == torch.float64
    assert len(truth[1]) == sum(weights.numel() for weights in model.parameters())
    assert next(model.parameters()).dtype == torch.float32
    build = partial(Trainer, model=model, device=CPU)
    errors = {name: errors_of(build(WorkloadConfig(precision=name)), batch, truth) for name in ("fp32", "fp16", "bf16")}
    assert max(errors["fp32"]) < 1e-5
    for fp16, bf16 in zip(errors["fp16"], errors["bf16"], strict=True):
        assert 1e-5 < fp16 < bf16 / 2 < 0.2
    doubled = tuple(2 * part for part in truth)
    assert errors_of(build(WorkloadConfig()), batch, doubled) == pytest.approx((0.5, 0.5), rel=1e-4)


def test_a_batch_of_few_samples_has_the_gradients_of_those(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Digits()
    model = MnistCNN()
    images, labels = loader.images[:8], loader.labels[:8]
    computed = []
    monkeypatch.setattr(MnistCNN, "forward", watched(MnistCNN.forward, computed))
    truth = reference(model, images, labels)
    assert computed == [4]
    assert max(errors_of(Trainer(WorkloadConfig(), model, CPU), (images, labels), truth)) < 1e-5
    assert computed == [4, 8]
    odd = reference(model, images[:7], labels[:7])
    assert len(odd[0]) == 10
    assert max(errors_of(Trainer(WorkloadConfig(), model, CPU), (images[:7], labels[:7]), odd)) < 1e-5


def watched(forward: Callable, computed: list[int]) -> Callable:
    def watch(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        computed.append(len(inputs))
        return forward(model, inputs)

    return watch


def test_the_reference_is_computed_without_cudnn_where_that_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    forward = MnistCNN.forward

    def without_engine(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        tried.append(torch.backends.cudnn.enabled)
        if torch.backends.cudnn.enabled:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return forward(model, inputs)

    monkeypatch.setattr(MnistCNN, "forward", without_engine)
    loader = Digits()
    outputs, _ = reference(MnistCNN(), loader.images[:4], loader.labels[:4])
    assert tried == [True, False] and outputs.isfinite().all()
    assert torch.backends.cudnn.enabled


def test_the_search_for_a_scale_ends_where_activations_overflow() -> None:
    class Overflows(MnistCNN):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * torch.inf

    loader = Digits()
    trainer = Trainer(WorkloadConfig(precision="fp16"), Overflows(), CPU)
    with pytest.raises(FloatingPointError, match="overflows in fp16, even with the loss times 1"):
        trainer.outputs_and_gradients(loader.images[:4], loader.labels[:4])


def test_long_products_are_waited_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [calls_per_wait(seconds) for seconds in (1e-5, 2e-3, 0.18)] == [20, 5, 1]


def test_flops_are_those_of_convolutions_and_matrix_products() -> None:
    """Forward counted by hand; backward costs as much for the inputs and for the weights of each layer."""
    flops = flops_per_sample(WorkloadConfig(), (torch.empty(3, 1, 28, 28), torch.zeros(3, dtype=torch.int64)))
    first = 2 * 26 * 26 * 32 * 9
    rest = 2 * (24 * 24 * 64 * 32 * 9 + 9216 * 128 + 128 * 10)
    assert flops == 2 * first + 3 * rest  # nobody asks for the gradient of the images


def test_peak_memory_on_a_cpu_is_that_of_tensors() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(2, 1000)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    weights = 4_000_000
    step()
    assert 2 * weights <= peak_bytes_on_cpu(step, model, optimizer) < 2.2 * weights
    adam = torch.optim.Adam(model.parameters())
    step()
    adam.step()
    assert 4 * weights <= peak_bytes_on_cpu(step, model, adam) < 4.2 * weights


def test_matrix_products_are_counted_as_two_operations_per_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timing:
        seconds = 1e-3

    monkeypatch.setattr("matrix_peak.measure", lambda *_: Timing)
    assert matmul_tflops((10, 20, 30), "bf16", CPU) == pytest.approx(2 * 10 * 20 * 30 * 1e3 / 1e12)
    monkeypatch.setattr("matrix_peak.SIZES", {"cpu": (8, 16)})
    assert matrix_peak("fp32", CPU) == pytest.approx(2 * 16**3 * 1e3 / 1e12)


def test_what_an_experiment_varies_is_no_flag(run_script: Script) -> None:
    for flag, value in (("precision", "bf16"), ("fused", "true"), ("compile", "default")):
        result = run_script("04_mixed_precision/experiments/ladder.py", f"--{flag}", value)
        assert (result.status, result.stderr) == (
            2,
            f"error: --{flag} is what this experiment varies; leave it out\n",
        )
    result = run_script("04_mixed_precision/experiments/ladder.py", "--trials", 1)
    assert (result.status, result.stderr) == (2, "error: --trials must be at least 2, got 1\n")


def test_shares_of_gradients_that_16_bits_cannot_hold() -> None:
    magnitudes = torch.tensor([2.0**-30, 2.0**-25, 2.0**-24, 2.0**-15, 2.0**-14, 1.0, 65504.0, 65536.0])
    fp16, scaled, bf16 = scaled_shares(magnitudes, [1.0, 2.0**16])
    assert (fp16["zero"], fp16["coarse"], fp16["overflow"]) == (2 / 8, 2 / 8, 1 / 8)
    assert (scaled["zero"], scaled["coarse"], scaled["overflow"]) == (0, 0, 3 / 8)
    assert (bf16["zero"], bf16["coarse"], bf16["overflow"]) == (0, 0, 0)
    assert torch.equal(magnitudes.half() == 0, magnitudes <= 2.0**-25)
    counts = dict(zip(EXPONENTS, histogram(torch.tensor([1.0, 1.9, 2.0**-14, 2.0**-99])), strict=True))
    assert (counts[0], counts[-14], counts[EXPONENTS[0]], counts[1]) == (0.5, 0.25, 0.25, 0)


def test_without_a_scaler_gradients_of_large_volumes_are_lost() -> None:
    """A mean over 2 x 5 x 64^3 values gives each a gradient of 2^-21.3; times small weights, that is 0 in fp16."""
    torch.manual_seed(0)
    model = UNet3D(width=2, depth=1)
    batch = torch.randn(2, 4, 64, 64, 64), torch.randn(2, 5, 64, 64, 64)
    magnitudes = collect_gradients(model, *batch)
    outer = 1 / batch[1].numel()
    assert torch.isclose(magnitudes, torch.tensor(outer)).sum() >= batch[1].numel()
    unscaled, scaled = (row["zero"] for row in scaled_shares(magnitudes, [1.0, 2.0**16])[:2])
    assert unscaled > 10 * scaled
    lost = partial(lost_weight_gradients, model, batch)
    assert lost(torch.float16, scaled=False) > lost(torch.float16, scaled=True)
    assert lost(torch.bfloat16, scaled=False) == lost(torch.float16, scaled=True) == 0


@pytest.mark.parametrize("script", ["underflow", "tensor_cores"])
def test_demonstrations_leave_a_results_file_and_a_plot(
    run_script: Script, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = []

    def collect(*arguments: object) -> torch.Tensor:
        rounded.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return collect_gradients(*arguments)

    monkeypatch.setattr("gradients.collect_gradients", collect)
    reset_switches()
    result = run_script(f"04_mixed_precision/experiments/{script}.py", "--quick", "true", "--out", tmp_path)
    assert result.status == 0, result.stderr
    results = json.loads((tmp_path / f"{script}.json").read_text())
    assert (tmp_path / f"{script}.png").stat().st_size > 10_000
    if script == "underflow":
        assert rounded == [(False, False)]
        assert sum(results["histogram"]) == pytest.approx(1)
        assert set(results["val_losses"]) == {"fp32", "fp16, loss times 2^-8", "fp16, not scaled", "fp16, scaled"}
        zeros = [row["zero"] for row in results["rows"] if row["format"] == "fp16"]
        assert zeros == sorted(zeros, reverse=True) and zeros[0] > zeros[-1]
    else:
        sizes = [row["size"] for row in results["rows"] if row["precision"] == "fp32"]
        assert sizes == list(range(248, 265))
        assert {row["size"]: row["alignment"] for row in results["rows"]}[248] == 8
        assert "without tensor cores" in result.stdout


def test_the_title_names_no_configuration_within_the_spread_of_one_before() -> None:
    def title(*speeds: tuple[float, float]) -> str:
        names = ("fp32", "bf16", "+ channels_last", "+ fused")
        rows = zip(names, speeds, (0.050, 0.049, 0.049, 0.051), strict=False)
        keys = ("name", "samples_per_second", "samples_per_second_std", "val_loss")
        return ladder.message([dict(zip(keys, (name, *speed, loss), strict=True)) for name, speed, loss in rows])

    added = "bf16: 1.4 times as fast as fp32, validation loss -2.0%; what is added gains no more than the spread"
    assert title((913, 83), (1262, 135), (1353, 192), (1348, 213)) == added
    assert (
        title((913, 83), (1262, 13), (1353, 19)) == "+ channels_last: 1.5 times as fast as fp32, validation loss -2.0%"
    )
    assert title((913, 183), (1262, 235), (1353, 292)) == "No configuration is faster than fp32 by more than the spread"


def summary(folder: Path, losses: list[float], seconds: float, model: str = "unet3d") -> Path:
    folder.mkdir()
    epochs = [{"epoch": i + 1, "val_loss": loss, "seconds": seconds} for i, loss in enumerate(losses)]
    results = {"config": {"model": model, "dataset": "nbody"}, "epochs": epochs}
    (folder / "summary.json").write_text(json.dumps(results))
    return folder


def test_score(run_script: Script, tmp_path: Path) -> None:
    score = partial(run_script, "04_mixed_precision/experiments/score.py")
    baseline = summary(tmp_path / "baseline", [0.5, 0.4, 0.45], 10.0)
    faster = summary(tmp_path / "faster", [0.45, 0.4, 0.3], 4.0)
    slower = summary(tmp_path / "slower", [0.45, 0.4], 12.0)
    worse = summary(tmp_path / "worse", [0.5], 1.0)
    not_always_a_number = summary(tmp_path / "some_nan", [math.nan, 0.5], 1.0)
    assert score(not_always_a_number).stdout.startswith("some_nan: lowest validation loss 0.5000 after 2.0 s")
    assert score(faster).stdout == "faster: lowest validation loss 0.3000 after 12.0 s of training (unet3d on nbody)\n"
    last_line = {
        faster: "2.50 times as fast to the baseline's loss (8.0 s against 20.0 s); the lowest is 25.0% lower",
        slower: "1.20 times as slow to the baseline's loss (24.0 s against 20.0 s); the lowest is 0.0% lower",
        worse: "the loss is 25.0% higher than the baseline's, which this run never reached",
    }
    for run, line in last_line.items():
        result = score(run / "summary.json", "--baseline", baseline)
        assert (result.status, result.stdout.splitlines()[-1]) == (0, f"conclusion: {line}")


def test_a_class_is_ranked_with_a_baseline_to_beat(run_script: Script, tmp_path: Path) -> None:
    score = partial(run_script, "04_mixed_precision/experiments/score.py")
    for name in ("ada", "bob", "eve", "kim", "max"):
        (tmp_path / name).mkdir()
    ada = summary(tmp_path / "ada" / "contest", [0.45, 0.41, 0.3], 5.0)
    bob = summary(tmp_path / "bob" / "contest", [0.40, 0.39], 6.0)
    eve = summary(tmp_path / "eve" / "contest", [0.42, 0.41], 1.0)
    kim = summary(tmp_path / "kim" / "contest", [0.1], 1.0, model="resnet18")
    plain = summary(tmp_path / "plain", [0.5, 0.4], 10.0)

    def ranking(*arguments: object) -> list[list[str]]:
        result = score(*arguments)
        assert result.status == 0, result.stderr
        return [line.split() for line in result.stdout.splitlines() if line[:1] == " " or line[:1].isdigit()]

    runs = (ada, bob, eve, kim, tmp_path / "max" / "contest")
    header, *rows = ranking(*runs, "--baseline", plain)
    assert header[:4] == ["run", "s", "to", "0.4000"]
    assert [row[:4] for row in rows] == [
        ["1", "bob/contest", "6.0", "0.3900"],
        ["2", "ada/contest", "15.0", "0.3000"],
        ["3", "plain", "(the", "baseline)"],
        ["4", "eve/contest", "never", "0.4100"],
    ]
    out = score(*runs, "--baseline", plain).stdout
    assert f"not ranked: {kim}: resnet18 on nbody, not unet3d on nbody" in out
    assert f"not ranked: cannot read {tmp_path / 'max' / 'contest'}: No such file" in out
    _, *rows = ranking(ada, bob, eve)
    assert [row[:3] for row in rows] == [["1", "ada", "0.3000"], ["2", "bob", "0.3900"], ["3", "eve", "0.4100"]]
    _, *rows = ranking(ada, bob, eve, "--epochs", 1)
    assert [row[1:3] for row in rows] == [["bob", "0.4000"], ["eve", "0.4200"], ["ada", "0.4500"]]


def test_a_run_validated_on_other_samples_is_not_ranked(run_script: Script, tmp_path: Path) -> None:
    honest, other = summary(tmp_path / "honest", [0.5], 1.0), summary(tmp_path / "other", [0.1], 1.0)
    results = json.loads((other / "summary.json").read_text())
    results["config"] |= {"limit_val": 4, "val_crops": None}
    (other / "summary.json").write_text(json.dumps(results))
    result = run_script("04_mixed_precision/experiments/score.py", honest, other)
    assert f"not ranked: {other}: unet3d on nbody, limit_val 4, not unet3d on nbody" in result.stdout


def test_what_cannot_be_scored_is_reported_in_one_line(run_script: Script, tmp_path: Path) -> None:
    score = partial(run_script, "04_mixed_precision/experiments/score.py")
    run = summary(tmp_path / "run", [0.5], 1.0)
    other = summary(tmp_path / "other", [0.5], 1.0, model="resnet18")
    empty = summary(tmp_path / "empty", [], 1.0)
    no_number = summary(tmp_path / "no_number", [math.nan, math.nan], 1.0)
    damaged = summary(tmp_path / "damaged", [0.5], 1.0)
    (damaged / "summary.json").write_text("[1, 2]")
    for arguments, message in (
        ([tmp_path], "summary.json: No such file or directory; name the folder of a run that has finished"),
        ([empty], "is of a run that has not finished an epoch"),
        ([no_number], "is of a run whose validation loss was never a number"),
        ([damaged], "is not the summary of a run: TypeError"),
        ([run, "--baseline", other], "unet3d on nbody cannot be compared with resnet18 on nbody"),
    ):
        result = score(*arguments)
        assert result.status == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ") and message in line

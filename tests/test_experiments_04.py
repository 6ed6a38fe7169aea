"""The experiments of lesson 04 with little work: right tables, right results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Script
from number_formats import FORMATS, FP8, TF32, NumberFormat, rounded_to_tf32
from workshop.errors import UserError
from workshop.hardware import computes_in
from workshop.models.unet3d import UNet3D

FOLDER = "04_mixed_precision/experiments"
SMALL = ["--unet_width", 4, "--crop_size", 8, "--train_crops", 16, "--val_crops", 4, "--global_batch_size", 4]
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e5m2": torch.float8_e5m2,
    "fp8 e4m3": torch.float8_e4m3fn,
}


def table_of(folder: Path, name: str) -> dict:
    (file,) = folder.glob(f"*/{name}.json")
    return json.loads(file.read_text())


# The formats.


@pytest.mark.parametrize("form", [form for form in (*FORMATS, *FP8) if form is not TF32], ids=lambda form: form.name)
def test_the_limits_are_those_of_the_format(form: NumberFormat) -> None:
    dtype = DTYPES[form.name]
    kept = [form.smallest, form.smallest_normal, form.largest, 1 + form.after_one]
    assert torch.tensor(kept, dtype=torch.float64).to(dtype).double().tolist() == kept
    lost = torch.tensor([form.smallest / 2, 1 + form.after_one / 2], dtype=torch.float64)
    assert lost.to(dtype).double().tolist() == [0, 1]


def test_tf32_has_the_digits_of_fp16_and_the_range_of_bf16() -> None:
    numbers = torch.linspace(-3, 3, 1000)  # none of them so small that fp16 has fewer digits for it
    assert torch.equal(rounded_to_tf32(numbers), numbers.half().float())
    assert rounded_to_tf32(torch.tensor([70_000.0, -1e-8])).tolist() == pytest.approx([70_000, -1e-8], rel=2**-11)


def test_the_formats_are_printed(run_script: Script) -> None:
    rows = [line.split() for line in run_script(f"{FOLDER}/number_formats.py").stdout.splitlines()]
    assert ["fp16", "0.099976", "257", "2048", "inf", "0"] in rows
    assert ["bf16", "0.1001", "256", "2048", "70144", "1.0012e-08"] in rows


def test_errors_follow_from_the_bits_and_memory_falls_by_less_than_half(run_script: Script, tmp_path: Path) -> None:
    result = run_script(f"{FOLDER}/format_errors.py", "--limit_val", 8, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    rows = {name: figures for name, *figures in table_of(tmp_path, "format_errors")["rows"]}
    assert rows.keys() == {"fp32", "fp16", "bf16"}  # a CPU has no TF32
    assert 6 < rows["bf16"][0] / rows["fp16"][0] < 9
    assert rows["fp32"][0] < 1e-5 and rows["fp32"][0] < rows["fp32"][1] < rows["bf16"][1] < 0.1
    most = 0.9 if computes_in(torch.device("cpu"), "bf16") else 1.0  # without the instructions, it makes copies in fp32
    assert 0.5 < rows["bf16"][2] / rows["fp32"][2] < most


# Underflow.


def test_gradients_are_counted_as_they_round(run_script: Script) -> None:
    import underflow

    values = torch.tensor([2.0**-30, -(2.0**-20), 3 * 2.0**-20, 1.0, 0.0])

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(5))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.weight

    found = underflow.histogram(Layer(), 5 * values, torch.full((5,), -1.0))  # the loss is a mean over 5 values
    assert found.sum().item() == pytest.approx(1)  # without the one that is zero
    weights = values[values != 0].abs()
    outputs = torch.full((5,), 0.2)
    for scale in (0, 14, 30):
        rounded = (torch.cat([weights, outputs]) * 2.0**scale).half()
        zero, infinite = (rounded == 0).float().mean(), rounded.isinf().float().mean()
        shares = underflow.shares(found, scale, "fp16")
        assert shares[::2] == [pytest.approx(zero.item()), pytest.approx(infinite.item())]
    assert underflow.shares(found, 0, "bf16") == [0, 0, 0]


def test_without_a_scaler_small_gradients_change_nothing(run_script: Script, tmp_path: Path) -> None:
    result = run_script(f"{FOLDER}/underflow.py", "--steps", 3, *SMALL, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    shares = {f"{form} {scale}": row for form, scale, *row in table_of(tmp_path, "underflow")["rows"]}
    assert shares["fp16 2<sup>-8</sup>"][0] > shares["fp16 2<sup>0</sup>"][0] > shares["fp16 2<sup>16</sup>"][0] < 1e-3
    assert shares["bf16 2<sup>0</sup>"] == [0, 0, 0]
    losses = dict(table_of(tmp_path, "underflow_losses")["rows"])
    assert losses["fp16, scaled"] == pytest.approx(losses["fp32"], rel=0.01)
    assert list(tmp_path.glob("*/underflow.png"))


# Speed.


def test_the_ladder_adds_one_option_each_to_what_the_device_has(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    speeds = {"fp32": 100.0, "bf16": 150.0}
    started: list[str] = []
    broken = {"tf32", "fp16", "cudnn_benchmark"}

    def train(_: Path, *flags: Any) -> dict:  # noqa: ANN401
        names = [flags[flags.index("--precision") + 1], *(str(flag)[2:] for flag in flags if str(flag)[2:] in OPTIONS)]
        started.append(" ".join(names))
        if broken & set(names):
            raise UserError("this is the CPU")
        speed = speeds[names[0]] + 10 * len(names)
        return {"SYNTHETIC": {"trials": [speed - 4, speed, speed + 4]}, "mfu": {"SYNTHETIC": 0.5}}

    monkeypatch.setattr("lab.launching.train", train)
    results = {"WORKSHOP_RESULTS": str(tmp_path)}
    result = run_script(f"{FOLDER}/ladder.py", **results)
    assert result.status == 0, result.stderr
    assert started == [
        *("fp32", "tf32", "fp16", "bf16", "bf16 cudnn_benchmark", "bf16 channels_last"),
        *(
            "bf16 channels_last fused",
            "bf16 channels_last fused compile",
            "bf16 channels_last fused compile cuda_graph",
        ),
        "bf16",
    ]
    assert "+ cudnn_benchmark: not measured: this is the CPU\n" in result.stdout
    stored = table_of(tmp_path, "precision_ladder")
    assert "unfinished" not in stored
    assert {row[0]: row[1:3] for row in stored["rows"]} == {
        "fp32": [[110, 4], None],
        "bf16": [[160, 4], "fp32: 1.5x"],
        "+ channels_last": [[170, 4], "bf16: 1.1x"],
        "+ fused": [[180, 4], "+ channels_last: 1.1x"],
        "+ compile": [[190, 4], "+ fused: 1.1x"],
        "+ cuda_graph": [[200, 4], "+ compile: 1.1x"],
        "again: bf16": [[160, 4], "bf16: noise"],
    }
    started.clear()
    assert run_script(f"{FOLDER}/ladder.py", "--configurations", "fp32,nothing", **results).status == 2
    speeds["bf16"] = None  # it is stopped there, by an exception that nobody expects
    with pytest.raises(TypeError):
        run_script(f"{FOLDER}/ladder.py", "--configurations", "fp32,bf16", **results)
    speeds["bf16"] = 150.0
    assert run_script(f"{FOLDER}/ladder.py", "--configurations", "fp32,bf16", **results).status == 0
    assert started == ["fp32", "bf16", "bf16"], "what was stored before is not measured again"


def test_the_ladder_compares_round_by_round(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drift = iter([1.0, 1.0, 1.0, 0.5, 0.5, 0.5])
    """the machine is slower in the second round: more than the formats differ"""

    def train(_: Path, *flags: Any) -> dict:  # noqa: ANN401
        speed = {"fp32": 100.0, "fp16": 100.0, "bf16": 150.0}[flags[flags.index("--precision") + 1]] * next(drift)
        return {"SYNTHETIC": {"trials": [speed - 1, speed, speed + 1]}, "mfu": {"SYNTHETIC": 0.5}}

    monkeypatch.setattr("lab.launching.train", train)
    flags = ["--configurations", "fp32,fp16,bf16", "--rounds", 2]
    assert run_script(f"{FOLDER}/ladder.py", *flags, WORKSHOP_RESULTS=str(tmp_path)).status == 0
    stored = table_of(tmp_path, "precision_ladder")
    assert [row[2] for row in stored["rows"]] == [None, "fp32: noise", "fp32: 1.5x (1.5 to 1.5)"]
    assert [row[1][0] for row in stored["rows"]] == [75, 75, 112.5]
    assert "6 trials" in stored["spread"]


OPTIONS = ("cudnn_benchmark", "channels_last", "fused", "compile", "cuda_graph")


def test_the_ladder_really_measures(run_script: Script, tmp_path: Path) -> None:
    flags = ["--configurations", "fp32,tf32", "--seconds", 0.05, "--config", "../configs/unet3d.yaml"]
    flags += ["--config", "../configs/unet3d_tiny.yaml", *SMALL]
    result = run_script(f"{FOLDER}/ladder.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    ((name, speed, *_, mfu, _),) = table_of(tmp_path, "precision_ladder")["rows"]
    assert name == "fp32" and speed[0] > 0 and 0 < mfu < 2
    assert "tf32: not measured: --precision tf32 needs an NVIDIA GPU" in result.stdout


def test_the_peak_of_each_format_is_measured(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("workshop.profiling.mfu.SIZES", {"cpu": (32,)})
    monkeypatch.setattr("workshop.profiling.mfu.SECONDS_PER_SIZE", 0.01)
    result = run_script(f"{FOLDER}/tensor_cores.py", WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    stored = table_of(tmp_path, "tensor_cores")
    assert [row[0] for row in stored["rows"]] == ["fp32", "fp16", "bf16"]
    assert stored["columns"] == ["", "peak"] and all(row[1] > 0 for row in stored["rows"])


def test_the_throughput_of_the_unet_is_stored_after_each_run_and_goes_on_there(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import workload

    measured: list[tuple[bool, str]] = []

    def train(config: Any, ranks: Any) -> None:  # noqa: ANN401
        assert config.benchmark and config.batch_size == 64 and ranks.world_size == 1
        measured.append((config.cuda_graph, config.precision))
        if config.cuda_graph and len(measured) == 2:
            raise UserError("it was cut here")
        kinds = {kind: {"trials": [1.0, 2.0, 3.0]} for kind in ("IO", "SYNTHETIC", "FULL")}
        found = kinds | {"mfu": {"SYNTHETIC": 0.3}, "peak_memory_bytes": 4e9}
        (Path(config.run_dir) / "throughput.json").write_text(json.dumps(found))

    monkeypatch.setattr(workload.LESSON, "train", train)
    assert run_script(f"{FOLDER}/unet3d_throughput.py", WORKSHOP_RESULTS=str(tmp_path)).status == 2
    assert len(table_of(tmp_path, "unet3d_throughput")["rows"]) == 1
    assert run_script(f"{FOLDER}/unet3d_throughput.py", WORKSHOP_RESULTS=str(tmp_path)).status == 0
    table = table_of(tmp_path, "unet3d_throughput")
    assert table["rows"][0][:-1] == ["all options", [2, 1], [2, 1], [2, 1], 0.3, 4] and len(table["rows"]) == 3
    assert "unfinished" not in table
    assert measured == [(False, "bf16"), (True, "bf16"), (True, "bf16"), (False, "fp32")]


def test_a_faster_format_has_a_lower_share_of_its_peak(run_script: Script, tmp_path: Path) -> None:
    assert run_script(f"{FOLDER}/published_mfu.py", WORKSHOP_RESULTS=str(tmp_path)).status == 0
    rows = table_of(tmp_path, "published_mfu")["rows"]
    assert rows[0][3] == pytest.approx(133 * 80.48e9 / 19.5e12, rel=1e-3)
    assert rows[0][3] > rows[1][3] > rows[2][3]


# Whole trainings.


def test_a_seed_that_misses_the_target_is_counted(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seeds: dict[str, list[int]] = {}

    def train(lesson: Path, *flags: Any) -> dict:  # noqa: ANN401
        name = "dropout" if "--dropout" in flags else "fp32" if "fp32" in flags else lesson.name[:2]
        seed = flags[flags.index("--seed") + 1]
        seeds.setdefault(name, []).append(seed)
        assert flags[flags.index("--limit_val") + 1] == "50"
        return {"epochs": [{"val_accuracy": 0.9799 if seed == 2 or name == "dropout" else 0.98}]}

    monkeypatch.setattr("lab.launching.train", train)
    flags = ["--seeds", 3, "--seeds_of_others", 1, "--limit_val", 50]
    result = run_script(f"{FOLDER}/success_rate.py", *flags, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    assert seeds == {"01": [1], "04": [1, 2, 3], "dropout": [1], "fp32": [1]}
    rows = table_of(tmp_path, "success_rate")["rows"]
    assert [row[1] for row in rows] == ["1/1", "2/3", "0/1", "1/1"]
    assert rows[1][2] == [0.98, 0.9799, 0.98]
    assert "--seed is what this experiment varies" in run_script(f"{FOLDER}/success_rate.py", "--seed", 3).error


def test_the_formats_are_compared_with_the_identity_baseline(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(_: Path, *flags: Any, on_cpu: bool) -> dict:  # noqa: ANN401
        loss = {"fp32": 0.04, "bf16": 0.05, "fp16": 0.04}[flags[flags.index("--precision") + 1]]
        return {"epochs": [{"val_loss": 1.0, "seconds": 1.0}, {"val_loss": loss, "seconds": 2.0}]}

    monkeypatch.setattr("lab.launching.train", train)
    result = run_script(f"{FOLDER}/unet3d.py", WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    *formats, baseline = table_of(tmp_path, "unet3d")["rows"]
    assert formats[1] == ["`bf16`", 0.05, pytest.approx(0.25), 3.0]
    assert 0.05 < baseline[1] < 1


@pytest.fixture
def unet_run(tmp_path: Path) -> Path:
    """The folder of a run, as far as the script reads it."""
    flags = {"model": "unet3d", "unet_width": 2, "unet_depth": 2, "epochs": 1}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"config": flags}))
    torch.save({"model": UNet3D(width=2, depth=2).state_dict()}, folder / "checkpoint.pt")
    return folder


def test_a_prediction_is_compared_with_the_identity_baseline(
    unet_run: Path, run_script: Script, data_dir: Path, tmp_path: Path
) -> None:
    result = run_script(f"{FOLDER}/see_prediction.py", unet_run, WORKSHOP_RESULTS=str(tmp_path))
    assert result.status == 0, result.stderr
    for _, whole, density, velocity, temperature in table_of(tmp_path, "unet_prediction")["rows"]:
        assert density + 3 * velocity + temperature == pytest.approx(5 * whole)
    assert list(tmp_path.glob("*/unet_prediction.png"))
    (unet_run / "summary.json").write_text(json.dumps({"config": {"model": "mnist_cnn"}}))
    assert "is a run of --model mnist_cnn" in run_script(f"{FOLDER}/see_prediction.py", unet_run).error
    assert "name the folder of a run" in run_script(f"{FOLDER}/see_prediction.py", tmp_path / "nothing").error

"""The convergence study: overlays that change what they claim, curves read right, conclusions that follow from them."""

import importlib.util
import json
import math
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import REPOSITORY, Script
from convergence_curves import Curve, conclude, curve_of, curves_table, plot, read_curves
from lab.render import large_batches
from workshop.commandline import load_config
from workshop.errors import UserError

pytestmark = pytest.mark.slow

CONFIGS = REPOSITORY / "configs"
COMMON = [CONFIGS / "cifar10.yaml", CONFIGS / "cifar10_convergence.yaml"]
CLAIMS = {
    "cifar10_b64": {"global_batch_size": 64},
    "cifar10_b512_naive": {"global_batch_size": 512},
    "cifar10_b512_sqrt": {"global_batch_size": 512, "lr_scaling": "sqrt"},
    "cifar10_b512_sqrt_long": {"global_batch_size": 512, "epochs": 15, "lr_scaling": "sqrt"},
    "cifar10_b256_sqrt_long": {"global_batch_size": 256, "epochs": 8, "lr_scaling": "sqrt"},
    "cifar10_b2048_sqrt_long": {"global_batch_size": 2048, "epochs": 60, "lr_scaling": "sqrt"},
}
STUDY = list(CLAIMS)[:4]
"""those that the command trains by default"""


def lesson() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lesson_03", REPOSITORY / "03_ddp" / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["lesson_03"] = module  # where the types of its dataclass are looked up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CLAIMS)
def test_an_overlay_changes_only_what_it_claims(name: str) -> None:
    config_class = lesson().Config
    files = [word for file in COMMON for word in ("--config", str(file))]
    common = vars(load_config(config_class, files))
    with_overlay = vars(load_config(config_class, [*files, "--config", str(CONFIGS / f"{name}.yaml")]))
    assert {key: value for key, value in with_overlay.items() if value != common[key]} == CLAIMS[name]
    assert (CONFIGS / f"{name}.yaml").read_text().startswith("# Convergence study")


def test_the_command_runs_the_four_of_the_study_and_batches_of_64_to_2048_have_about_as_many_steps() -> None:
    overlays = runpy.run_path(str(REPOSITORY / "03_ddp" / "experiments" / "convergence.py"))["OVERLAYS"]
    assert [file.stem for file in overlays] == STUDY
    longer = [claim for name, claim in CLAIMS.items() if name.endswith("long")]
    steps = [math.ceil(10_000 / claim["global_batch_size"]) * claim["epochs"] for claim in longer]
    assert sorted(steps) == [300, 300, 320]
    assert {file.stem for file in CONFIGS.glob("cifar10_b*.yaml")} == set(CLAIMS)


# --- reading and comparing curves -----------------------------------------------------------------------------------


def summary(batch: int, losses: list[float], **config: object) -> dict:
    """What a run on 1,000 samples leaves that trained them in 2 s per epoch."""
    epochs = [
        {"epoch": epoch, "val_loss": loss, "seconds": 2.0, "samples_per_second": 500.0}
        for epoch, loss in enumerate(losses, start=1)
    ]
    config = {
        "lr": 0.01,
        "lr_scaling": "none",
        "base_batch_size": 64,
        "warmup": 0.1,
        "seed": 1,
        "epochs": len(losses),
    } | config
    return {"config": config, "global_batch_size": batch, "world_size": 2, "epochs": epochs}


def curves() -> list[Curve]:
    return [
        curve_of("small", summary(64, [2.0, 1.5, 1.2])),
        curve_of("naive", summary(512, [2.2, 2.0, 1.9])),
        curve_of("scaled", summary(512, [2.2, 1.8, 1.2, 1.0, 1.1], lr_scaling="sqrt")),
        curve_of("passed", summary(256, [1.1, 1.6], lr_scaling="linear")),
    ]


def test_a_curve_counts_steps_and_seconds() -> None:
    small, naive, scaled, passed = curves()
    assert small.steps == [16, 32, 48]
    assert small.seconds == [2.0, 4.0, 6.0]
    assert naive.steps == [2, 4, 6]
    assert (naive.epochs, naive.world_size, naive.val_loss) == (3, 2, [2.2, 2.0, 1.9])
    assert [curve.peak_lr for curve in (small, naive, scaled, passed)] == pytest.approx(
        [0.01, 0.01, 0.01 * math.sqrt(8), 0.04]
    )


def test_epoch_at_target() -> None:
    small, naive, scaled, passed = curves()
    assert [curve.epoch_at(1.2) for curve in (small, naive, scaled, passed)] == [3, None, 3, 1]


def test_table() -> None:
    header, *lines = curves_table(curves()).splitlines()
    assert re.split("  +", header)[-2:] == ["steps to 1.200", "seconds to it"]
    assert lines[0].split() == ["small", "64", "0.01", "3", "48", "1.200", "1.200", "6.0", "48", "6.0"]
    assert lines[1].split() == ["naive", "512", "0.01", "3", "6", "1.900", "1.900", "6.0", "never"]
    assert lines[2].split() == ["scaled", "512", "0.028", "5", "10", "1.100", "1.000", "10.0", "6", "6.0"]


def test_conclusions_follow_from_the_curves() -> None:
    naive, scaled, passed = conclude(curves())
    assert naive == "naive ends at a validation loss of 1.900, above small's 1.200, which it never reaches"
    assert "scaled ends at a validation loss of 1.100, as low as small (1.200) or lower" in scaled
    assert "reaches that after 6 steps (small: 48) and 6.0 s of training (small: 6.0 s)" in scaled
    assert "passed ends at a validation loss of 1.600, above small's 1.200, and reaches that after 4 steps" in passed


def test_plot(tmp_path: Path) -> None:
    plot(curves(), tmp_path / "plot.png")
    image = imread(tmp_path / "plot.png")
    assert image.shape[0] > 400
    assert image.shape[1] > 1000
    red = (image[..., 0] > 0.7) & (image[..., 1] < 0.3) & (image[..., 2] < 0.3)
    assert red.sum() > 200  # the curve of the second run


def test_a_run_that_stopped_early_is_not_compared() -> None:
    with pytest.raises(UserError, match="small stopped after 2 of 3 epochs"):
        curve_of("small", summary(64, [2.0, 1.5], epochs=3))


def test_runs_on_other_data_are_not_compared(tmp_path: Path) -> None:
    for name, samples in (("small", 1000), ("large", 2000)):
        results = summary(64, [2.0], dataset="cifar10", limit_train=samples, limit_val=None)
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(results))
    assert len(read_curves([tmp_path / "small"])) == 1
    with pytest.raises(UserError, match=r"--limit_train differs \(small: 1000, large: 2000\)"):
        read_curves([tmp_path / "small", tmp_path / "large"])


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def convergence(run_script: Script) -> Script:
    return partial(run_script, "03_ddp/experiments/convergence.py")


def test_runs_trained_one_by_one_are_compared(convergence: Script, run_script: Script, tmp_path: Path) -> None:
    files = [word for file in COMMON for word in ("--config", file)]
    for name in STUDY:
        flags = ["--limit_train", 600, "--limit_val", 100, "--run_dir", tmp_path / name]
        assert run_script("03_ddp/train.py", *files, "--config", CONFIGS / f"{name}.yaml", *flags).status == 0
    result = convergence("--train", "false", "--out", tmp_path)
    assert result.status == 0, result.stderr
    results = json.loads((tmp_path / "convergence.json").read_text())
    assert [curve["name"] for curve in results["curves"]] == STUDY
    assert [curve["steps"][-1] for curve in results["curves"]] == [50, 10, 10, 30]
    for curve in results["curves"]:
        losses = [
            epoch["val_loss"] for epoch in json.loads((tmp_path / curve["name"] / "summary.json").read_text())["epochs"]
        ]
        assert curve["val_loss"] == losses
        assert scalars(tmp_path / curve["name"])["epoch/val_loss"] == pytest.approx(losses)
    assert results["target_val_loss"] == results["curves"][0]["val_loss"][-1]
    assert results["hardware"]["cpu"]
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert result.stdout.count("=> ") == 3
    assert f"tensorboard --logdir {tmp_path}" in result.stdout


def test_it_trains_in_a_process_of_its_own(convergence: Script, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("global_batch_size: 64\nepochs: 2\n")
    result = convergence("--overlay", small, "--limit_train", 200, "--limit_val", 50, "--out", tmp_path / "study")
    assert result.status == 0, result.stderr
    assert (
        "$ python train.py --config ../configs/cifar10.yaml --config ../configs/cifar10_convergence.yaml"
        in result.stdout
    )
    (curve,) = json.loads((tmp_path / "study" / "convergence.json").read_text())["curves"]
    assert (curve["name"], curve["steps"]) == ("small", [4, 8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--overlay", "nowhere.yaml"],
            "there is no config file nowhere.yaml; those of the workshop are",
        ),
        (["--config", "nowhere.yaml"], "there is no config file nowhere.yaml"),
        (
            ["--overlay", "../configs/mnist.yaml", "--overlay", "../configs/mnist.yaml"],
            "mnist.yaml, mnist.yaml are alike",
        ),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "many"], "--ranks: invalid int value: 'many'"),
        (["--train", "perhaps"], "--train: takes true or false, got 'perhaps'"),
        (["--train", "false", "--lr", "1"], "--train false trains nothing, so '--lr 1' would have no effect"),
        (["--train", "false"], "train first, without --train false"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    convergence: Script, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = convergence(*arguments, "--out", tmp_path)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_flag_that_train_py_does_not_know_ends_the_study(convergence: Script, tmp_path: Path) -> None:
    result = convergence("--limit_trian", 200, "--out", tmp_path)
    assert result.status == 2
    assert result.stderr == "error: unknown flag --limit_trian; did you mean --limit_train?\n"
    assert result.stdout.count("$ python train.py") == 1


# --- what is kept of it ---------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("name", STUDY)
def test_an_example_log_holds_the_curves_of_its_run(name: str) -> None:
    folder = REPOSITORY / "results" / "example_logs" / name
    (file,) = folder.iterdir()
    assert file.name == "events.out.tfevents.0.example"  # its own name would contain that of a machine
    assert file.stat().st_size < 20_000
    epochs = CLAIMS[name].get("epochs", 5)
    tags = ("epoch/train_loss", "epoch/val_loss", "epoch/val_accuracy", "epoch/lr")
    assert [len(scalars(folder)[tag]) for tag in tags] == [epochs] * 4


def test_the_text_on_large_batches_follows_from_the_figures() -> None:
    names = ("cifar10_b64", "cifar10_b512_naive", "cifar10_b512_sqrt", "cifar10_b512_sqrt_long")

    def results(*finals: tuple[float, ...]) -> dict:
        curves = zip(names, zip(*finals, strict=True), strict=True)
        return {"curves": {name: [{"val_loss": [3.0, final]} for final in ends] for name, ends in curves}}

    fixed = large_batches(results((1, 2, 1.5, 0.9), (1, 2, 2.5, 1)))
    assert "ends higher than the small one with 2 of 2 seeds" in fixed
    assert "lower than the naive run with 1 of 2." in fixed
    assert fixed.endswith("or lower, with 2 of 2.")
    broken = large_batches(results((1, 2, 2.5, 1.1), (1, 0.9, 1.5, 1.1)))
    assert "ends higher than the small one with 1 of 2 seeds" in broken
    assert "lower than the naive run with 0 of 2." in broken
    assert broken.endswith("or lower, with 0 of 2.")

"""The command line: flags, YAML keys and fields have the same names; every mistake is reported in one line."""

import inspect
import re
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from conftest import REPOSITORY
from lab.launching import load_script
from workshop.commandline import load_config
from workshop.config import TrainConfig
from workshop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    lr_decay: float = 0.7


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults_are_those_of_the_dataclass() -> None:
    assert load_config(Config, []) == Config()


def test_flags_win_over_later_files_over_earlier_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "batch_size: 8\nlr: 1e-2\nepochs: 3\n")
    second = write(tmp_path / "b.yaml", "batch_size: 16\nlr_decay: 0.5\n")
    config = load_config(Config, ["--epochs", "5", "--config", first, "--config", second])
    assert (config.batch_size, config.lr, config.epochs, config.lr_decay) == (16, 0.01, 5, 0.5)


def test_data_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    assert load_config(Config, []).data_dir == tmp_path


@pytest.mark.parametrize(
    "arguments", [["--trace"], ["--trace", "--epochs", "2"], ["--trace", "true"], ["--trace=true"]]
)
def test_a_switch_needs_no_value(arguments: list[str]) -> None:
    assert load_config(Config, arguments).trace


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batchsize", "3"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["--zzz=1"], "unknown flag --zzz; known are: --batch_size"),
        (["--batch_size", "many"], "--batch_size takes int, got 'many'"),
        (["--batch_size", "1.5"], "--batch_size takes int, got '1.5'"),
        (["--dataset", "imagenet"], "--dataset takes one of 'mnist'"),
        (["--resume", "perhaps"], "--resume takes bool, got 'perhaps'"),
        (["--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        (["--num_workers", "-1"], "--num_workers must be 0 (load in the training process) or more, got -1"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--limit_train", "0"], "--limit_train must be at least 1, got 0"),
        (["--lr", "0"], "--lr must be above 0, got 0.0"),
        (["--batch_size"], "--batch_size needs a value"),
        (["--config"], "--config needs a value"),
        (["stray"], "unrecognized arguments: stray"),
        (["--config", "nowhere.yaml"], "cannot read the config file nowhere.yaml: No such file or directory"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(Config, arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise: 3\n", "{file}: unknown key 'batch_sise'; did you mean batch_size?"),
        ("batch_size: many\n", "--batch_size takes int, got 'many' (in {file})"),
        ("- a\n- b\n", "{file} must hold lines of the form 'key: value', found a list"),
        ("a: [\n", "{file} is not valid YAML"),
        ("lr: 1\nlr: 2\n", "{file} is not valid YAML: key 'lr' appears twice"),
        ("batch_size: 010\n", "{file} is not valid YAML: write 010 as a plain number, or in quotes"),
        ("epochs: 1:30\n", "{file} is not valid YAML: write 1:30 as a plain number, or in quotes"),
        ("lr: 1:30.5\n", "{file} is not valid YAML: write 1:30.5 as a plain number, or in quotes"),
        ("a: " + 2000 * "[" + 2000 * "]", "{file} is not valid YAML: maximum recursion depth exceeded"),
        ("lr:\n", "{file}: 'lr' has an empty value: give it one, or take the line out"),
        ("lr: .nan\n", "--lr must be a number of at most 3.4e+38, got nan"),
        ("lr: 1e39\n", "--lr must be a number of at most 3.4e+38, got 1e+39"),
    ],
)
def test_wrong_yaml_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "run.yaml", text)
    with pytest.raises(UserError) as error:
        load_config(Config, ["--config", file])
    assert message.format(file=file) in str(error.value)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_a_file_may_be_empty(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "run.yaml", text)
    assert load_config(Config, ["--config", file, "--lr", "0.5"]) == Config(lr=0.5)


def test_a_file_may_only_unset_a_flag(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.yaml", "save_interval: 5\n"), write(tmp_path / "b.yaml", "save_interval:\n")
    assert load_config(Config, ["--config", second]).save_interval is None
    assert load_config(Config, ["--config", first, "--config", second]).save_interval is None


def test_a_flag_that_may_be_unset_may_be_empty(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.yaml", "limit_train: 5\n"), write(tmp_path / "b.yaml", "limit_train:\nlr: 1\n")
    assert load_config(Config, ["--config", first, "--config", second]) == Config(lr=1.0)


LESSON_04 = load_script(REPOSITORY / "04_mixed_precision")  # the lesson that has all keys of configs/


def test_help_shows_every_flag_once_under_the_title_of_its_group(capsys: pytest.CaptureFixture) -> None:
    lesson = LESSON_04.Config
    with pytest.raises(SystemExit) as end:
        load_config(lesson, ["--help"], "What it is for.\n\n    python train.py    # how")
    assert not end.value.code
    shown = capsys.readouterr().out
    assert "What it is for.\n\n    python train.py    # how\n" in shown  # with the line breaks of the docstring
    groups = [group for group in lesson.__mro__ if is_dataclass(group)]
    assert groups == [lesson, TrainConfig]
    titles = [group.__doc__.partition(".")[0] for group in groups]
    _, *sections = re.split("|".join(f"{re.escape(title)}:" for title in titles), shown)
    own, shared = (re.findall(r"^  --(\w+)", section, re.MULTILINE) for section in sections)
    assert own == list(inspect.get_annotations(lesson))  # also "dataset", which has one value more than elsewhere
    assert shared == [field.name for field in fields(TrainConfig) if field.name != "dataset"]
    assert sorted(own + shared) == sorted(field.name for field in fields(lesson))
    assert "--dataset {mnist,cifar10,nbody}" in sections[0]


def test_an_unknown_flag_of_another_lesson_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^unknown flag --cuda_graph; it is a flag of 04_mixed_precision, not of this"):
        load_config(Config, ["--cuda_graph", "true"])
    file = write(tmp_path / "run.yaml", "accumulate: 3\n")
    with pytest.raises(UserError, match=r"unknown key 'accumulate'; it is a flag of 05_fully_sharded, not of this"):
        load_config(Config, ["--config", file])


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_every_key_of_a_shipped_config_arrives(file: Path) -> None:
    model = file.name.partition("_")[0]
    base = ["--config", str(file.with_name(f"{model}.yaml"))] if model in ("unet3d", "vit3d") else []
    config = load_config(LESSON_04.Config, [*base, "--config", str(file)])
    for key, value in yaml.safe_load(file.read_text()).items():
        assert getattr(config, key) == value

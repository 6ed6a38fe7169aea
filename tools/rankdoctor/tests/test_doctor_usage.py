"""How the doctor is started: its command line, launchers, packages, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from asked_runs import Doctor
from rankdoctor import cli, launch
from rankdoctor.settings import Settings

PROJECT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_script_is_started_as_a_module_of_a_package(doctor: Doctor) -> None:
    package = doctor.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "names.py").write_text("FILE = 'package.losses'\n")
    script = (doctor.folder / "one_process.py").read_text()
    (package / "train.py").write_text(f"from .names import FILE\n{script}\nopen(FILE, 'w').close()\n")
    status, out, _ = doctor.run("-m", "package.train")
    assert status == 0 and "package.losses" in out
    _, _, err = doctor.run("-m", "package.nothing")
    assert err.startswith("rankdoctor: error: there is no module package.nothing")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("book.ipynb", '{"cells": []}', "book.ipynb is a notebook: jupyter nbconvert --to script book.ipynb"),
        (
            "run.sh",
            "torchrun --nproc-per-node 8 \\\n    train.py --lr 0.1\n",
            "it starts: rankdoctor train.py --lr 0.1",
        ),
        ("job", "#!/bin/bash\nsrun hostname\n", "job is a shell script; name the script it starts"),
        (
            "start.py",
            "import subprocess\nsubprocess.run('torchrun train.py'.split())",
            "it starts: rankdoctor train.py",
        ),
    ],
)
def test_what_is_no_training_script_is_refused_with_the_command_to_use(
    doctor: Doctor, name: str, text: str, said: str
) -> None:
    (doctor.folder / name).write_text(text)
    status, _, err = doctor.run(name)
    assert status == 2 and said in err


@pytest.mark.thorough
def test_variables_of_two_launchers_and_of_the_site_and_files_that_a_library_in_c_writes(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_OF_OUR_SITE", "7")
    monkeypatch.setenv("SLURM_PROCID", "5")  # of the shell that the doctor is started from
    status, out, _ = doctor.run("cluster.py")
    assert status == 0, out
    assert "1 file(s) have changed meanwhile" in out and "beside.bin" in out
    assert "wanted to write 2 file(s)" in out and "new/folder/inside.bin" in out
    assert (doctor.folder / "beside.bin").exists() and not (doctor.folder / "new").exists()


def installed(folder: Path) -> Path:
    """Build the wheel from a copy, install it into a folder site-packages, and return that."""
    source, site = folder / "source", folder / "site-packages"
    shutil.copytree(PROJECT, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("rankdoctor-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", site, wheel], check=True)
    return site


@pytest.mark.thorough
def test_the_installed_package_is_complete_and_finds_the_same(doctor: Doctor, tmp_path: Path) -> None:
    """Noise and seeds are noticed only where the user's own line draws them: not a file in site-packages."""
    site = installed(tmp_path)
    modules = {file.relative_to(PROJECT / "src") for file in PROJECT.glob("src/rankdoctor/**/*.py")}
    assert {file.relative_to(site) for file in site.glob("rankdoctor/**/*.py")} == modules
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    command = [site / "bin" / "rankdoctor", "--json", "ddp.py", "all_save,same_dropout"]
    done = subprocess.run(command, cwd=doctor.folder, env=alone, text=True, capture_output=True)
    assert done.returncode == 1, done.stderr
    found = {finding["check"]: finding["text"] for finding in json.loads(done.stdout)["findings"]}
    assert found.keys() == {"one_writer", "same_dropout", "same_noise"}
    assert re.search(r"because ddp.py:\d+ seeds all of them with 0", found["same_noise"])


@pytest.mark.slow
def test_script_for_one_process(doctor: Doctor) -> None:
    status, out, _ = doctor.run("--report", "report.html", "one_process.py")
    assert status == 0
    assert "1 rank" in out
    assert "Nothing found." in out
    assert "losses.txt" in out  # the file that it wanted to write
    assert not (doctor.folder / "losses.txt").exists()
    assert "Nothing found." in (doctor.folder / "report.html").read_text()


@pytest.mark.thorough
def test_the_launcher_is_another_one_if_the_ranks_do_not_join(doctor: Doctor) -> None:
    """The script reads variables of torchrun and of Slurm, so its text does not say which it needs."""
    text = (doctor.folder / "ddp.py").read_text()
    start = 'import os\nos.environ["RANK"], os.environ["LOCAL_RANK"] = os.environ["SLURM_PROCID"], "0"\n'
    (doctor.folder / "both.py").write_text(f'{start}# "RANK" is what torchrun sets\nrank = os.getenv("RANK")\n{text}')
    report, found = doctor.findings("both.py")
    assert report["ranks"] == [2] and report["updates"] and found == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "there is no script missing.py"),
        ([], "name a training script"),
        (["--resume", "--resume", "ddp.py"], "write --resume=ARGS with an equals sign"),
        (["--nproc", "0", "ddp.py"], "--nproc must be larger than 0"),
        (["--gpus_per_task", "-1", "ddp.py"], "--gpus_per_task must not be below 0"),
        (["--preload", "none.py", "ddp.py"], "there is no file none.py"),
        (["--cpu", "--on_gpus", "ddp.py"], "exclude each other"),
        (["--reread", "nowhere"], "nowhere has no runs"),
        (["--no_such_option", "ddp.py"], "unrecognized arguments: --no_such_option; --help shows the options"),
        (["--steps", "many", "ddp.py"], "argument --steps: invalid int value: 'many'"),
    ],
)
def test_misuse_is_one_line(doctor: Doctor, arguments: list[str], said: str) -> None:
    status, out, err = doctor.run(*arguments)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("rankdoctor: error: ")
    assert said in line


def test_a_python_without_torch_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The environment must be that of the user's script."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", missing)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train.py"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("has no PyTorch: start the doctor with the Python with which your script trains")


def test_null_gpus_without_their_package_are_one_line(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nullgpu", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--null_gpu", str(doctor.folder / "ddp.py")])
    assert capsys.readouterr().err == (
        "rankdoctor: error: --null_gpu needs the package nullgpu, which stands beside this one: pip install "
        "./tools/nullgpu, or leave out --null_gpu\n"
    )


class NullGPU(types.ModuleType):
    """A package in place of nullgpu."""

    class NotPossible(Exception):
        pass

    def environment(self, base: Mapping[str, str], **options: object) -> dict[str, str]:
        if options != {"gpus": 2, "values": True}:
            raise self.NotPossible("there is no compiler: install g++")
        return dict(base) | {"PYTHONPATH": f"/null/hook:{base['PYTHONPATH']}"}


def test_the_hook_of_the_doctor_comes_before_that_of_null_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nullgpu", NullGPU("nullgpu"))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    plan = launch.Plan(Path("train.py"), [], ranks=4, nodes=2, gpus="null")
    env = launch.environment(plan, 3, Settings(scratch="/scratch", root="/"))
    assert env["PYTHONPATH"].split(":") == [str(launch.HOOK), "/null/hook", "/mine"]
    assert "CUDA_VISIBLE_DEVICES" not in env and env["NCCL_HOSTID"] == "node 1"
    with pytest.raises(launch.NoNullGPU, match=r"^--null_gpu: there is no compiler: install g\+\+$"):
        launch.environment(replace(plan, nodes=4), 0, Settings(scratch="/scratch", root="/"))


@pytest.mark.parametrize(("version", "warned"), [("2.4.1+cu121", True), ("2.11.0", False), ("2.15.0a0+git1", False)])
def test_an_old_torch_is_said(
    version: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(cli, "version", lambda _: version)
    cli.see_environment()
    assert capsys.readouterr().err.startswith("rankdoctor: PyTorch 2.4.1+cu121 is older than 2.11") == warned


def test_full_has_no_limit_of_updates(doctor: Doctor) -> None:
    """So that an epoch of more than 100 updates comes to its validation."""
    plain, full, both = (
        cli.make_plan(cli.parser().parse_args([*flags, str(doctor.folder / "ddp.py")])).settings
        for flags in ([], ["--full"], ["--full", "--steps", "7"])
    )
    assert (plain["batches"], plain["steps"]) == (8, 100)
    assert (full["batches"], both["batches"], both["steps"]) == (0, 0, 7) and full["steps"] > 10**6


@pytest.mark.thorough
def test_a_kept_log_can_be_judged_again(doctor: Doctor) -> None:
    first = doctor.run("--keep", "kept", "one_process.py")
    again = doctor.run("--reread", "kept")
    assert again == first

"""`measure.py gpu`: experiments in time, each part kept at once; they are made up here, and GPUs faked."""

import gzip
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
import yaml

import workshop.profiling
from conftest import REPOSITORY, Result, Script
from lab import (
    experiment_functions,
    lesson_runs,
    machine_facts,
    measure,
    measure_gpu,
    processes,
    results_file,
    small_studies,
)
from lab.experiments import EXPERIMENTS
from lab.launching import load_script
from lab.session import Experiment, Session, installed
from lab.trace_table import trace_table
from workshop.commandline import load_config
from workshop.errors import UserError

SCRIPT = "lab/measure.py"
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS", "WORKSHOP_DATA")


def experiment_of(measure: Callable[..., Iterator[dict]], name: str = "measured", **more: object) -> Experiment:
    """An experiment that is measured on GPUs and in a rehearsal."""
    known: dict[str, Any] = {"name": name, "title": "a test", "measure": measure, "gpu": (), "rehearsal": ()}
    return Experiment(**known | more)


def experiment(
    name: str,
    work: Callable[[], object] = lambda: None,
    seconds: int = 1,
    data: tuple[str, ...] = (),
    **figures: object,
) -> Experiment:
    """An experiment that does ``work`` after its first part of two."""

    def measured(_: Session) -> Iterator[dict]:
        yield {"part": 1}
        work()
        yield {"part": 2} | figures

    return experiment_of(measured, name, seconds=seconds, data=data)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path / "fake_1gpu.json")


def run(
    chosen: list[Experiment], session: Session, seconds: float = 60, no_data: dict[str, str] | None = None
) -> dict[str, str]:
    deadline = time.monotonic() + seconds + measure_gpu.SPARE_SECONDS
    return measure_gpu.measure_in_time(chosen, session, deadline, "measure.py gpu", no_data or {})


def test_every_experiment_is_written_with_what_it_needs(session: Session) -> None:
    assert run([experiment("one", figure=7), experiment("two")], session) == {}
    all_results = results_file.read_results(session.file)
    assert (all_results["one"]["part"], all_results["one"]["figure"]) == (2, 7)
    for results in all_results.values():
        assert results.keys() >= results_file.ABOUT
        assert "unfinished" not in results and results["total_seconds"] >= results["first_part_seconds"] >= 0
    assert [file.name for file in session.file.parent.iterdir()] == [session.file.name]


def test_what_does_not_fit_is_left_out_and_named(session: Session) -> None:
    chosen = [
        experiment("long", seconds=1000),
        experiment("short"),
        experiment("endless", lambda: time.sleep(100), seconds=0),
    ]
    started = time.monotonic()
    reasons = run(chosen, session, seconds=8)
    assert time.monotonic() - started < 60
    assert reasons["long"].startswith("not measured: its first part takes about 1000 s")
    assert reasons["endless"].startswith("cut off") and reasons["endless"].endswith("is kept")
    all_results = results_file.read_results(session.file)
    assert all_results.keys() == {"short", "endless"}
    assert all_results["endless"]["unfinished"] and all_results["endless"]["part"] == 1


def test_a_part_that_hangs_does_not_cost_the_rest(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part has a limit of its own, and the next part starts with all of it."""
    monkeypatch.setattr(measure_gpu, "LONGEST_PART", 1)

    def slow(_: Session) -> Iterator[dict]:
        for part in range(3):
            time.sleep(0.5)
            yield {"part": part}

    chosen = [experiment_of(slow, "slow"), experiment("hangs", lambda: time.sleep(300), 0), experiment("two")]
    reasons = run(chosen, session, seconds=300)
    assert reasons.keys() == {"hangs"} and reasons["hangs"].startswith("cut off: after 1 s")
    assert results_file.read_results(session.file)["slow"]["part"] == 2


def test_an_experiment_starts_if_its_first_part_fits(session: Session) -> None:
    """Although the whole of it takes longer than what is left, by what was measured before."""
    run([experiment("one")], session)
    known = {"part": 2, "first_part_seconds": 5, "total_seconds": 500}
    results_file.save_results(session.file, "one", known, "measure.py gpu")
    assert run([experiment("one", seconds=1000)], session) == {}
    results_file.save_results(session.file, "one", known | {"first_part_seconds": 500}, "measure.py gpu")
    (reason,) = run([experiment("one")], session).values()
    assert "takes about 500 s" in reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("no such file"), "failed: no such file"),
        (ZeroDivisionError("division by zero"), "failed: ZeroDivisionError: division by zero"),
        (StopIteration(), "failed: RuntimeError: generator raised StopIteration"),
        (FileNotFoundError("nsys"), "failed: FileNotFoundError: nsys"),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_no_exception_stops_the_others(error: Exception, reason: str, session: Session) -> None:
    def fail() -> None:
        raise error

    reasons = run([experiment("one", fail), experiment("two")], session)
    assert reasons == {"one": f"{reason}; what it had measured by then is kept"}
    all_results = results_file.read_results(session.file)
    assert all_results["one"]["unfinished"] and all_results["two"]["part"] == 2


def test_the_end_of_the_program_is_no_failure_of_an_experiment(session: Session) -> None:
    with pytest.raises(SystemExit):
        run([experiment("one", lambda: sys.exit(1)), experiment("two")], session)
    assert results_file.read_results(session.file).keys() == {"one"}


def test_a_part_that_fails_leaves_the_other_parts(session: Session) -> None:
    def fail() -> dict:
        raise RuntimeError("out of memory")

    def measured(_: Session) -> Iterator[dict]:
        yield from lesson_runs.measured_in_turn({"a": lambda: 1, "b": fail, "c": lambda: 3})

    assert run([experiment_of(measured)], session) == {"measured": "failed in part: b (RuntimeError: out of memory)"}
    results = results_file.read_results(session.file)["measured"]
    assert results["rows"] == {"a": 1, "c": 3} and results["failed"] == {"b": "RuntimeError: out of memory"}


def test_missing_data_are_reported_for_what_needs_them(session: Session) -> None:
    chosen = [experiment("volumes", data=("nbody",)), experiment("digits", data=("mnist",))]
    reasons = run(chosen, session, no_data={"nbody": "No module named 'h5py'"})
    assert reasons == {"volumes": "failed: no nbody data: No module named 'h5py'"}
    assert results_file.read_results(session.file).keys() == {"digits"}


def killed_at(name: str, killed: str) -> Callable[[], object]:
    return lambda: name == killed and os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("killed", ["one", "two", "three"])
def test_killed_at_any_experiment_the_file_is_whole_and_the_next_start_goes_on(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    names, out = ["one", "two", "three"], tmp_path / "out"
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path))
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # put back in the end
    monkeypatch.setattr(measure_gpu, "generate_data", lambda _: {})
    facts = machine_facts.this_machine()
    monkeypatch.setattr(results_file, "this_machine", lambda: facts)  # to ask anew takes seconds
    before = signal.getsignal(signal.SIGTERM)

    def rehearse(*chosen: Experiment) -> None:
        monkeypatch.setattr(measure_gpu, "EXPERIMENTS", chosen)
        measure_gpu.main(["--rehearse", "true", "--out", str(out)], time.monotonic())

    if (child := os.fork()) == 0:
        rehearse(*(experiment(name, killed_at(name, killed)) for name in names))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    file = out / "rehearsal.json"
    done = names[: names.index(killed)]
    all_results = results_file.read_results(file)
    assert [name for name, results in all_results.items() if "unfinished" not in results] == done
    assert all_results[killed]["part"] == 1
    order = []
    rehearse(*(experiment(name, lambda name=name: order.append(name)) for name in names))
    signal.signal(signal.SIGTERM, before)
    assert order == [name for name in names if name not in done] + done
    assert all("unfinished" not in results for results in results_file.read_results(file).values())
    assert "3 of 3 measured completely" in capsys.readouterr().out


def test_results_that_are_cut_short_leave_those_before(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    results_file.save_results(session.file, "one", {"figure": 7}, "a command")
    write = Path.write_text

    def write_half(file: Path, text: str) -> None:
        write(file, text[: len(text) // 2])
        raise OSError

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError):
        results_file.save_results(session.file, "two", {"figure": 8}, "a command")
    assert results_file.read_results(session.file).keys() == {"one"}


def test_the_parent_asks_no_gpu_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A CUDA context of the parent would take memory, and on a GPU in exclusive mode keep all children from it."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the parent must not use CUDA")

    hardware = {"device": "cuda", "device_name": "Fake GPU", "gpus": 1, "cpus_available": 16}
    facts = {"hardware": hardware, "versions": {}, "emulates_bf16": False}
    monkeypatch.setattr(machine_facts, "ask", lambda question: {"machine": facts}[question])
    machine_facts._this_machine.cache_clear()
    for module, name in (
        (torch.cuda, "_lazy_init"),
        (torch.cuda, "is_available"),
        (torch.cuda, "get_device_properties"),
        (torch.cuda, "device_count"),
        (torch.accelerator, "current_accelerator"),
    ):
        monkeypatch.setattr(module, name, refuse)
    seen = []

    def measured(session: Session) -> Iterator[dict]:
        seen.append((session.file, session.gpus, session.num_workers))
        yield {"figure": 1}

    monkeypatch.setattr(measure_gpu, "generate_data", lambda _: {})
    monkeypatch.setattr(measure_gpu, "EXPERIMENTS", (experiment_of(measured), experiment_of(measured, gpus=2)))
    before = signal.getsignal(signal.SIGTERM)
    try:
        measure_gpu.main(["--out", str(tmp_path)], time.monotonic())
    finally:
        signal.signal(signal.SIGTERM, before)
        machine_facts._this_machine.cache_clear()
    assert seen == [(tmp_path / "fake_gpu_1gpu.json", 1, 14)]
    assert results_file.read_results(seen[0][0])["measured"]["hardware"] == hardware
    assert "1 of 1 measured completely" in capsys.readouterr().out


def test_with_out_what_results_has_is_not_measured_again_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir(), out.mkdir()
    hardware = {"device": "cuda", "gpus": 1, "cpus_available": 1}
    monkeypatch.setattr(measure_gpu, "RESULTS", results)
    monkeypatch.setattr(measure_gpu, "machine_name", lambda: "fake_1gpu")
    monkeypatch.setattr(measure_gpu, "this_machine", lambda: {"hardware": hardware})
    assert measure_gpu.measuring_session(None).file == results / "fake_1gpu.json"
    (results / "fake_1gpu.json").write_text('{"known": 1}')
    session = measure_gpu.measuring_session(out)
    assert (session.file, session.num_workers) == (out / "fake_1gpu.json", 1)
    assert session.file.read_text() == '{"known": 1}'


WRITER = """
import json, sys, subprocess, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
for number in range(1, 4):
    temporary = out / "figures.tmp"
    temporary.write_text(json.dumps({"rows": list(range(number)), "config": {"out": str(out)}}))
    temporary.replace(out / "figures.json")
    print("part", number, flush=True)
    go = Path(sys.argv[1]) / str(number)
    while not go.exists():
        time.sleep(0.01)
(out / "figures.png").write_text("a plot")
"""


def test_an_experiment_is_read_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is there before the experiment goes on to the next one; the plot when it has ended."""
    monkeypatch.setattr(lesson_runs, "POLL_SECONDS", 0.02)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "writer.py").write_text(WRITER)
    parts = lesson_runs.study_parts(tmp_path, "writer.py", tmp_path, machine=tmp_path / "fake")
    for number in range(1, 4):
        assert next(parts) == {"rows": list(range(number)), "config": {}}
        assert not (tmp_path / "fake_figures.png").exists()
        (tmp_path / str(number)).touch()
    assert list(parts) == []
    assert (tmp_path / "fake_figures.png").read_text() == "a plot"


def test_what_fails_is_reported_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('error: no GPU')")
    (tmp_path / "writes_nothing.py").write_text("")
    with pytest.raises(UserError, match="no GPU"):
        list(lesson_runs.run_parts([sys.executable, "fails.py"], tmp_path))
    with pytest.raises(UserError, match=r"no JSON file was written by: .*writes_nothing\.py"):
        list(lesson_runs.run_parts([sys.executable, "writes_nothing.py"], tmp_path))


@pytest.mark.skipif(not processes.PROC.exists(), reason="needs /proc")
def test_what_is_cut_off_leaves_no_process_behind(tmp_path: Path) -> None:
    """Nor one in a session of its own, as torchrun starts its ranks."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    program = f"import subprocess; subprocess.Popen({sleeper}, start_new_session=True).wait()"
    with pytest.raises(measure_gpu.TimeIsUp), processes.started([sys.executable, "-c", program], tmp_path) as process:
        while not (family := processes.descendants(process.pid)):
            time.sleep(0.01)
        raise measure_gpu.TimeIsUp
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(state_of(pid) not in ("", "Z") for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """Return the letter of a process's state, "Z" if nobody has asked for its status yet; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_data_are_generated_at_the_same_time(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    wait = "import sys, time; from pathlib import Path; Path(sys.argv[1]).touch()\n"
    wait += "while not Path(sys.argv[2]).exists(): time.sleep(0.01)"
    commands = {
        "a": [sys.executable, "-c", wait, tmp_path / "a", tmp_path / "b"],
        "b": [sys.executable, "-c", wait, tmp_path / "b", tmp_path / "a"],
        "c": [sys.executable, "-c", "raise ModuleNotFoundError('no h5py')"],
    }
    assert processes.run_together(commands, tmp_path) == {"c": "ModuleNotFoundError: no h5py"}
    capfd.readouterr()


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_smaller_boxes_are_not_used_and_not_replaced(
    data_folder: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = {}
    monkeypatch.setattr(Session, "cells", lambda self: edges[self.boxes])
    beside = data_folder / "boxes_of_128_cells"
    assert measure_gpu.with_boxes(session).boxes == beside  # the lessons expect smaller ones in the usual place
    (data_folder / "nbody").mkdir(parents=True)
    for cells, expected in ((64, beside), (127, beside), (128, data_folder), (512, data_folder)):
        edges[data_folder] = cells
        chosen = measure_gpu.with_boxes(session)
        assert chosen.boxes == expected
        assert ("nbody" in measure_gpu.data_commands(chosen)) == (expected == beside)
    command = measure_gpu.data_commands(measure_gpu.with_boxes(Session(session.file, boxes=beside)))
    assert "nbody" not in command
    edges[data_folder] = 64
    words = measure_gpu.data_commands(measure_gpu.with_boxes(session))["nbody"]
    assert words[words.index("--cells") + 1] == 128 and words[words.index("--data_dir") + 1] == beside


def test_shards_that_fail_do_not_cost_the_images(
    data_folder: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_gpu, "installed", lambda _: True)

    def generate(commands: dict, _: Path) -> dict[str, str]:
        assert "--shards" in commands["mnist"] and "--shards" in commands["cifar10"]
        (data_folder / "MNIST").mkdir(parents=True)
        return {"mnist": "cannot write shards", "cifar10": "disk full"}

    monkeypatch.setattr(measure_gpu, "run_together", generate)
    assert measure_gpu.generate_data(measure_gpu.with_boxes(session)) == {"cifar10": "disk full"}


def test_data_that_are_there_in_spite_of_an_error_are_used(
    data_folder: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = measure_gpu.with_boxes(session)

    def generate(commands: dict, _: Path) -> dict[str, str]:
        assert "nbody" in commands
        (session.boxes / "nbody").mkdir(parents=True)
        return {"nbody": "exit status 1"}

    monkeypatch.setattr(measure_gpu, "run_together", generate)
    assert measure_gpu.generate_data(session) == {}


def test_without_a_package_the_rest_is_measured(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.session.installed", lambda name: name != "line_profiler")
    chosen = [one for one in EXPERIMENTS if one.name in ("baseline", "line_profiles")]
    reasons = run([*chosen, experiment("other")], session)
    assert reasons == dict.fromkeys(("line_profiles", "baseline"), "not measured: line_profiler is not installed")


def test_loaders_whose_package_is_missing_are_named(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not installed("no_such_package.at_all") and installed("torch.nn")
    monkeypatch.setattr(experiment_functions, "installed", lambda name: False)
    monkeypatch.setattr(lesson_runs, "train", lambda *flags, **_: {"flags": [str(flag) for flag in flags]})
    session = Session(session.file, cpus=16)
    for measured in (one for one in EXPERIMENTS if one.name in ("loaders", "mnist_loaders")):
        *_, figures = measured.run(session)
        assert (list(figures["loaders"]), figures["not_installed"]) == (["map", "memory", "device"], ["shards", "dali"])
        assert figures["num_workers"] == 14
        for loader in figures["loaders"].values():
            assert loader["flags"][loader["flags"].index("--num_workers") + 1] == "14"


def test_lessons_train_without_line_profiler(run_script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "line_profiler", None)
    monkeypatch.setattr(workshop, "profiling", workshop.profiling)  # put back what the import below replaces
    monkeypatch.delitem(sys.modules, workshop.profiling.__name__)
    result = run_script("01_single_gpu/train.py", "--limit_train", 64, "--limit_val", 64, "--loader", "memory")
    assert result.status == 0, result.stderr


def mistake(result: Result) -> str:
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_mistake_is_one_line_and_status_2(run_script: Script, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = mistake(run_script(SCRIPT, "gpu"))
    assert "has no NVIDIA GPU: try everything on the CPU with --rehearse true" in line
    for minutes in ("0", "-1", "nan"):
        assert f"--minutes must be above 0, got {float(minutes)}" in mistake(
            run_script(SCRIPT, "gpu", "--minutes", minutes)
        )
    assert "--rehearse: takes true or false, got 'yes'" in mistake(run_script(SCRIPT, "gpu", "--rehearse", "yes"))
    assert "name another folder with --out" in mistake(run_script(SCRIPT, "gpu", "--out", tmp_path / "file"))
    assert "no experiment 'gpus'" in mistake(run_script(SCRIPT, "gpus"))


@pytest.mark.parametrize("text", ["[]", "{", '{"fast": 3}', '{"fast": {"rows": []}}'])
def test_a_file_of_another_schema_is_refused(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # put back in the end
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path))
    file = tmp_path / "gpu_rehearsal" / "rehearsal.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UserError, match=str(file)):
        measure_gpu.main(["--rehearse", "true"], time.monotonic())
    assert file.read_text() == text


@pytest.mark.parametrize("mode", ["cpu", "gpu", "rehearsal"])
def test_every_experiment_starts_what_is_there(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In each mode each experiment names scripts and files that exist, and flags that train.py has."""
    started = []
    small = {"convergence", "unet3d", *(one.__name__ for one in small_studies.STUDIES)}  # they start no `run_parts`
    rates = {kind: {"mean": 1.0} for kind in ("IO", "SYNTHETIC", "FULL")}

    def note(command: list, folder: Path, **_: object) -> Iterator[dict]:
        started.append((folder, [str(word) for word in command]))
        epoch = {"seconds": 1.0, "samples_per_second": 1.0, "val_accuracy": 0.99}
        yield rates | {"epochs": [epoch], "first_step_seconds": 0.5, "config": {}}

    monkeypatch.setattr(lesson_runs, "run_parts", note)
    monkeypatch.setattr(lesson_runs, "this_machine", lambda: {"emulates_bf16": False})
    monkeypatch.setattr(experiment_functions, "trace_table", lambda _: {})
    monkeypatch.setattr(experiment_functions, "ask", lambda *_: 1e12)
    monkeypatch.setattr(
        experiment_functions, "line_profile", lambda *flags: next(note(["train.py", *flags], lesson_runs.LESSON_01))
    )
    monkeypatch.setattr(Session, "cells", lambda _: 128)
    session = Session(tmp_path / "a.json", mode, cpus=16, gpus=4, boxes=tmp_path)
    for measured in EXPERIMENTS:
        if measured.flags(session) is None or measured.name in small:
            continue
        count = len(started)
        *_, figures = measured.run(session)
        assert "failed" not in figures
        assert len(started) > count
        if measured.name in ("unet3d_throughput", "unet3d_scaling"):
            assert {row["tflops"]["FULL"] for row in figures["rows"].values()} == {1.0}
            assert {row["ranks"] for row in figures["rows"].values()} <= {1, 4}
        if "nbody" in measured.data:
            assert figures["cells"] == 128
    for folder, words in started:
        files = [word for word in words if word.endswith((".py", ".yaml"))]
        assert files and all((folder / file).exists() for file in files)
        if "train.py" in words:
            flags = words[words.index("train.py") + 1 :]
            monkeypatch.chdir(folder)
            config = load_config(load_script(folder).Config, flags)
            if getattr(config, "cuda_graph", False) and config.dataset == "mnist":
                assert config.limit_train % config.batch_size == 0, "the graph cannot run a shorter last batch"


def test_the_fast_configuration_has_whole_batches_for_a_cuda_graph() -> None:
    configs = [
        yaml.safe_load((REPOSITORY / "configs" / name).read_text()) for name in ("mnist.yaml", "mnist_fast.yaml")
    ]
    merged = configs[0] | configs[1]
    assert merged["limit_train"] % merged["batch_size"] == 0


def test_the_flops_of_a_sample_are_counted() -> None:
    flags = ["--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml"]
    assert machine_facts.ask("flops", *flags) == pytest.approx(0.065e9, rel=0.05)


def test_a_question_without_an_answer_says_why() -> None:
    with pytest.raises(UserError, match="KeyError: 'weather'"):
        machine_facts.ask("weather")


def test_training_seconds_are_kept_with_those_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = {"seconds": 2.0, "samples_per_second": 1.0, "val_accuracy": 0.99}
    summary = {"epochs": [epoch], "first_step_seconds": 0.5}
    monkeypatch.setattr(lesson_runs, "train", lambda *_, **__: summary)
    runs = {"baseline": lesson_runs.TO_TARGET["baseline"]}
    (found,) = lesson_runs.time_to_target(1, runs=runs)
    assert found["runs"] == {"baseline": [epoch | {"first_step_seconds": 0.5}]}
    summary["epochs"] = [epoch | {"val_accuracy": 0.9}, epoch, epoch]  # those after it reached the target do not count
    (found,) = lesson_runs.time_to_target(1, runs=runs)
    assert found["runs"]["baseline"][0]["seconds"] == 4.0
    summary["epochs"] = [epoch | {"val_accuracy": 0.9}]
    with pytest.raises(UserError, match=r"baseline reached 90.00% in 1 epoch\(s\), not 98%"):
        list(lesson_runs.time_to_target(1, runs=runs))


def test_first_and_later_epochs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = [{"epoch": n, "seconds": 4.0 / n, "samples_per_second": n, "val_accuracy": 0.9} for n in (1, 2)]
    monkeypatch.setattr(lesson_runs, "train", lambda *_, **__: {"epochs": epochs, "first_step_seconds": 0.5})
    found = lesson_runs.epoch_seconds(lesson_runs.LESSON_01, "--epochs", 2)
    assert [epoch["seconds"] for epoch in found["epochs"]] == [4.0, 2.0]
    assert (found["flags"], found["first_step_seconds"]) == (["--epochs", 2], 0.5)


@pytest.mark.parametrize(("gpus", "ranks", "masked"), [(0, 2, False), (1, 2, True), (4, 4, False)])
def test_one_gpu_is_masked_for_what_needs_two(
    gpus: int, ranks: int, masked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    seen = []

    def study_parts(*_: object, ranks: int = 1, **__: object) -> Iterator[dict]:
        seen.append((ranks, os.environ["CUDA_VISIBLE_DEVICES"]))
        yield {}

    monkeypatch.setattr("lab.session.study_parts", study_parts)
    session = Session(tmp_path / "a.json", "cpu")
    list(experiment_functions.allreduce(session))
    list(experiment_functions.scaling(session))
    assert seen == [(ranks, "" if masked else "0"), (1, "" if masked else "0")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("error", [UserError("needs two"), CalledProcessError(1, ["torchrun"])], ids=type)
def test_what_cannot_be_measured_does_not_cost_the_rest(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail() -> dict:
        raise error

    file = REPOSITORY / "runs" / f"{os.getpid()}.json"  # shown relative to the repository
    file.parent.mkdir(exist_ok=True)
    in_part = experiment_of(lambda _: iter([{"loaders": {}, "failed": {"dali": "no engine"}}]), "in_part", cpu=())
    works = experiment_of(lambda _: iter([{}, {"figure": 1}]), "works", cpu=())
    try:
        with pytest.raises(UserError, match="not measured: one, in_part; the lines above say why"):
            measure.measure([experiment_of(lambda _: fail(), "one", cpu=()), in_part, works], Session(file, "cpu"))
        assert results_file.read_results(file).keys() == {"works"}
        assert results_file.read_results(file)["works"]["figure"] == 1
        errors = capsys.readouterr().err
        assert f"one: not measured: {error}" in errors and "in_part: not measured: dali: no engine" in errors
    finally:
        file.unlink()


def test_hardware_that_another_process_measured_with_is_kept(session: Session) -> None:
    results_file.save_results(session.file, "one", {"hardware": {"device": "cuda"}}, "a command")
    (results,) = results_file.read_results(session.file).values()
    assert (results["hardware"], results["command"]) == ({"device": "cuda"}, "a command")


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0, "tid": tid}


def test_the_table_of_a_trace_counts_each_microsecond_once(tmp_path: Path) -> None:
    steps = [event(f"ProfilerStep#{n}", "user_annotation", 1000 * n, 900) for n in range(2)]
    steps += [event("aten::conv", "cpu_op", 1000 * n, 500) for n in range(2)]
    steps += [event("aten::pad", "cpu_op", 1000 * n + 100, 100) for n in range(2)]
    steps += [event("aten::pad", "cpu_op", 0, 50, tid=2), {"ph": "M", "name": "a name"}]
    kernels = [event("gemm", "kernel", 10, 300, tid=7), event("copy", "gpu_memcpy", 320, 100, tid=7)]
    for name, events in (("cpu", steps), ("gpu", steps + kernels)):
        with gzip.open(tmp_path / name, "wt") as file:
            json.dump({"traceEvents": events}, file)
    on_cpu, on_gpu = trace_table(tmp_path / "cpu"), trace_table(tmp_path / "gpu")
    assert (on_cpu["clock"], on_cpu["steps"], on_cpu["step_ms"]) == ("CPU", 2, 0.9)
    assert [(r["name"], r["calls_per_step"], r["ms_per_step"]) for r in on_cpu["rows"]] == [
        ("aten::conv", 1, 0.4),
        ("aten::pad", 1.5, 0.125),
    ]
    assert (on_gpu["clock"], [r["name"] for r in on_gpu["rows"]]) == ("GPU", ["gemm", "copy"])
    assert on_gpu["rows"][0]["share"] == 0.75

"""The doctor runs a script as its user would: it finds the faults, with their lines, and changes nothing."""

import json
import subprocess
import sys

import pytest

from asked_runs import DOCTOR, Doctor, null_gpus, processes_of
from rankdoctor import cli, series


@pytest.mark.slow
def test_correct_script_has_no_finding_and_nothing_is_changed(doctor: Doctor) -> None:
    (doctor.folder / "checkpoint.pt.old").write_text("mine")
    before = {file.name: file.stat().st_mtime_ns for file in doctor.folder.iterdir()}
    report, found = doctor.findings("ddp.py")
    assert report["errors"] == []
    assert found == {}
    assert report["status"] == 0
    assert len(report["fine"]) > 20
    assert {file.name: file.stat().st_mtime_ns for file in doctor.folder.iterdir()} == before
    assert not processes_of(str(doctor.folder))


def test_faults_are_found_with_their_lines(doctor: Doctor) -> None:
    report, found = doctor.findings("ddp.py", "bare,same_order,padded,no_eval,clip_scaled,all_save,item")
    assert found["weights_agree"] == "call"
    assert found["same_order"] == "sampler"
    assert found["validation_counts"] == "val_loader"
    assert found["validation_mode"] == "validate"
    assert found["clip_scaled"] == "clip"
    assert found["one_writer"] == "save"
    assert found["waits"] == "item"
    assert report["status"] == 1


@pytest.mark.slow
def test_a_validation_that_forgets_no_grad_is_a_validation(doctor: Doctor) -> None:
    _, found = doctor.findings("ddp.py", "with_grad")
    assert found == {"validation_gradients": "validate"}
    _, found = doctor.findings("ddp.py", "with_grad,no_eval,not_combined")
    assert found["validation_mode"] == found["validation_gradients"] == "validate"
    assert found["results_combined"] == "validation"


@pytest.mark.thorough
def test_an_order_that_repeats_only_because_passes_are_cut_is_no_fault(doctor: Doctor) -> None:
    assert doctor.findings("endless.py")[1] == {}
    assert doctor.findings("endless.py", "same")[1] == {"same_order": "sampler"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("faults", "wanted"),
    [
        ("same_samples,not_combined", "same_samples train_loader results_combined validation"),
        ("held_out,schedule,graphs", "held_out split schedule_length schedule graphs_kept backward"),
        ("frozen,workers,same_workers", "weights_agree wrap workers_restarted train_loader same_workers train_loader"),
        ("one_class,same_dropout", "gradients_arrive backward same_dropout call same_noise noise"),
        ("not_zeroed", "gradients_zeroed update"),
    ],
)
def test_each_fault_is_found(doctor: Doctor, faults: str, wanted: str) -> None:
    _, found = doctor.findings("ddp.py", faults)
    checks, marks = wanted.split()[::2], wanted.split()[1::2]
    assert [found.get(check) for check in checks] == marks


@pytest.mark.thorough
def test_provocations_find_what_an_ordinary_run_does_not_show(doctor: Doctor) -> None:
    report, found = doctor.findings("--thorough", "ddp.py", "local_rank,collective_per_batch,forgetful,skip_nan")
    runs = {(finding["check"], finding["run"]) for finding in report["findings"]}
    assert ("same_samples", "as on two nodes") in runs
    assert ("resumed", "stopped and resumed") in runs
    assert ("same_collectives", "with uneven data") in runs  # one rank has a batch more in validation
    assert ("same_collectives", "with a NaN on rank 1") in runs
    assert found["same_samples"] == "train_loader"


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["spike", "patience"])
def test_what_one_rank_decides_by_its_own_loss_is_found(doctor: Doctor, fault: str) -> None:
    report, _ = doctor.findings("--outliers", "ddp.py", fault)
    runs = {(finding["check"], finding["run"]) for finding in report["findings"] if finding["kind"] == "FAULT"}
    assert {run for _, run in runs} == {"with outliers on rank 1"}, report["findings"]


@pytest.mark.slow
def test_what_the_stand_in_cannot_run_is_run_on_null_gpus(doctor: Doctor) -> None:
    null_gpus()
    report, found = doctor.findings("fsdp1.py")
    assert report["runs"][0]["gpus"] == "null"
    assert "FSDP" in report["runs"][0]["instead"]
    assert report["updates"][0] == 16
    assert not report["errors"]
    assert found == {}


@pytest.mark.thorough
def test_faults_are_found_on_null_gpus_too(doctor: Doctor) -> None:
    null_gpus()
    report, found = doctor.findings("--null_gpu", "ddp.py", "bare,same_order,padded,no_eval,clip_scaled,all_save,item")
    assert report["runs"][0]["gpus"] == "null"
    _, expected = doctor.findings("ddp.py", "bare,same_order,padded,no_eval,clip_scaled,all_save,item")
    assert found == expected


@pytest.mark.thorough
def test_provocations_side_by_side_find_the_same(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(doctor.folder)
    monkeypatch.setattr(series, "at_once", lambda plan: 2)
    assert cli.main(["--uneven", "--two_nodes", "--json", "ddp.py", "local_rank"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in report["runs"]] == ["", "with uneven data", "as on two nodes"]
    assert {(f["check"], f["run"]) for f in report["findings"]} >= {("same_samples", "as on two nodes")}


@pytest.mark.thorough
def test_a_fault_that_begins_with_the_second_resume_is_found(doctor: Doctor) -> None:
    """The checkpoint counts the epochs since the last start."""
    report, found = doctor.findings("--resume=", "ddp.py", "counted_anew")
    assert [finding["run"] for finding in report["findings"]] == ["resumed a second time"]
    assert list(found) == ["resumed"]


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [[], ["--null_gpu"]])
def test_a_checkpoint_that_all_ranks_load_to_the_gpu_of_rank_0_is_found(doctor: Doctor, gpus: list[str]) -> None:
    if gpus:
        null_gpus()
    _, found = doctor.findings(*gpus, "--resume=", "ddp.py", "unlocated")
    assert found == {"loaded_to_own_gpu": "load"}


@pytest.mark.thorough
def test_a_checkpoint_that_is_saved_from_the_cpu_needs_no_map_location(doctor: Doctor) -> None:
    _, found = doctor.findings("--resume=", "ddp.py", "unlocated,from_cpu")
    assert found == {}


@pytest.mark.thorough
def test_provocations_find_no_more_than_the_source_says(doctor: Doctor) -> None:
    report, found = doctor.findings("--thorough", "ddp.py")
    (skipped,) = [finding for finding in report["findings"] if finding["kind"] != "COST"]
    assert skipped["run"].startswith("with a batch that") and "skip_nan" in found["same_collectives"], (
        "it is in the source"
    )
    names = {one["name"] for one in report["runs"]}
    assert {"with uneven data", "as on two nodes", "with a NaN on rank 1", "stopped", "stopped and resumed"} <= names
    assert "A resumed run goes on where the stopped one was." in report["fine"]


PYTORCH_ABORTS = "terminate called without an active exception"
"""what a rank says that PyTorch aborts when its process ends: once in some thousand runs, without the doctor too"""


@pytest.mark.thorough
def test_losses_are_those_without_the_doctor(doctor: Doctor) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for name, command in (("plain", torchrun), ("doctor", [*DOCTOR, "--cpu", "--full", "--no_redirect"])):
        words = [*command, "losses.py", f"{name}.json"]
        for _ in range(2):
            done = subprocess.run(words, cwd=doctor.folder, text=True, capture_output=True, timeout=300)
            if name == "doctor" or PYTORCH_ABORTS not in done.stderr:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(json.loads((doctor.folder / f"{name}.json").read_text()))
    assert losses[0] == losses[1]


BESIDE = [
    "profiler",
    "scheduled_profiler",
    "old_profiler",
    "sync_norm",
    "converted_norm",
    "compiled",
    "anomaly",
    "memory_history",
    "debugger",
    "faulthandler",
    "settrace",
]
"""tools that change PyTorch, or Python, at the same time as the doctor"""


@pytest.mark.thorough
@pytest.mark.parametrize("tool", BESIDE)
def test_a_script_with_another_tool_runs_and_is_not_accused(doctor: Doctor, tool: str) -> None:
    report, found = doctor.findings("beside.py", tool)
    assert report["errors"] == [] and report["updates"] == [8]
    assert report["runs"][0]["gpus"] == "standin", "the first try is enough"
    assert found == {} and report["status"] == 0


@pytest.mark.thorough
def test_collectives_of_torch_2_15_are_seen(doctor: Doctor) -> None:
    report, found = doctor.findings("ddp.py", "not_combined,single")
    assert "results_combined" not in found
    assert "all_gather" in report["fine"]["The ranks exchange the results of a validation that they share."]

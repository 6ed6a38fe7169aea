"""What a lesson teaches stands in its train.py, and the script runs when it is copied into an empty folder.

What stands there is read from the syntax tree, where comments do not count. A line of `STANDS_IN` is a call as it is
written, perhaps without the object in front of its dot; the words in parentheses are arguments that it must be given
by name. A word in quotes is a text in the script.
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import quick_python
from conftest import REPOSITORY

TRAINING = """
DataLoader(batch_sampler, num_workers, pin_memory, persistent_workers, prefetch_factor)
torch.optim.SGD() torch.optim.Adam() torch.optim.AdamW() .to(non_blocking)
F.cross_entropy() .backward() .zero_grad() .train() .eval() torch.manual_seed() record_function() .step()
"""
CHECKPOINT = """
.state_dict() .load_state_dict() torch.save() torch.load(map_location, weights_only) os.fsync() os.replace() .testzip()
"""
RANKS = """
"RANK" "LOCAL_RANK" "WORLD_SIZE" "SLURM_PROCID" "SLURM_LOCALID" "SLURM_STEP_NUM_TASKS" torch.cuda.set_device()
dist.init_process_group(backend, rank, world_size, timeout) DistributedBatchSampler(rank, num_replicas, shuffle)
.set_epoch(start_step) dist.all_reduce() dist.destroy_process_group()
signal.signal() "scontrol" "requeue" LambdaLR()
"""
DDP = "DistributedDataParallel() .no_sync() torch.inference_mode()"
PRECISION = "torch.amp.GradScaler() torch.set_float32_matmul_precision() scaler.scale() scaler.step() scaler.update()"
ADADELTA = "torch.optim.Adadelta()"
STANDS_IN = {
    "01_single_gpu": f"{TRAINING} {ADADELTA} {CHECKPOINT} torch.inference_mode() StepLR()",
    "02_dataparallel": f"{TRAINING} {ADADELTA} {CHECKPOINT} torch.inference_mode() StepLR() nn.DataParallel()",
    "03_ddp": f"{TRAINING} {ADADELTA} {CHECKPOINT} {RANKS} {DDP}",
    "04_mixed_precision": f"""{TRAINING} {ADADELTA} {CHECKPOINT} {RANKS} {DDP} {PRECISION}
        torch.autocast() torch.compile() torch.optim.Adam(fused) torch.cuda.CUDAGraph() torch.cuda.graph() .replay()""",
    "05_fully_sharded": f"""{TRAINING} {RANKS} {PRECISION}
        torch.device() "meta" fully_shard(mesh, mp_policy, reshard_after_forward) .to_empty(device) .compile()
        MixedPrecisionPolicy(param_dtype, reduce_dtype) .set_requires_gradient_sync() nn.utils.clip_grad_norm_()
        checkpoint(use_reentrant) dcp.save(storage_writer, process_group) dcp.async_save(storage_writer, process_group)
        dcp.load(checkpoint_id) ".metadata" zlib.crc32()""",
}
LESSONS = sorted(STANDS_IN)


def calls_in(source: str) -> list[tuple[str, set[str]]]:
    """Every call: what is called, and the names of its arguments."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [(f".{ast.unparse(call.func)}", {word.arg for word in call.keywords if word.arg}) for call in calls]


def missing(source: str, described: str) -> list[str]:
    """Return which of the things described are not in the source."""
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    calls = calls_in(source)
    absent = []
    for name, arguments, text in re.findall(r'([\w.]+)\(([^)]*)\)|("[^"]+")', described):
        names = set(arguments.split(", ")) - {""}
        end = f".{name.removeprefix('.')}"
        if not (text.strip('"') in texts if text else any(c.endswith(end) and names <= given for c, given in calls)):
            absent.append(text or name)
    return absent


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_a_lesson_teaches_stands_in_its_script(lesson: str) -> None:
    source = (REPOSITORY / lesson / "train.py").read_text()
    assert missing(source, STANDS_IN[lesson]) == []
    for name in set(re.findall(r"\.?(\w+)\(", STANDS_IN[lesson])):  # and is noticed where it is not
        assert missing(re.sub(rf"\b{name}\b", "something_else", source), STANDS_IN[lesson]), name


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_a_lesson_teaches_is_pytorchs(lesson: str) -> None:
    """`DataLoader` and the rest are imported from torch, not from the package."""
    origin: dict[str, str | None] = {}
    for node in ast.walk(ast.parse((REPOSITORY / lesson / "train.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            origin |= {alias.asname or alias.name: node.module for alias in node.names}
    names = {name.partition(".")[0] for name in re.findall(r"(?<![.\w])([\w.]+)\(", STANDS_IN[lesson])}
    of_package = {name for name in names & origin.keys() if (origin[name] or "").startswith("workshop")}
    assert of_package <= {"DistributedBatchSampler"}


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_copied_script_runs_in_an_empty_folder(lesson: str, user_environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(REPOSITORY / lesson / "train.py", folder)
    text = lesson.startswith("05")
    flags = ["--limit_train", 64, "--limit_val", 16]
    flags += ["--width", 64, "--depth", 2, "--sequence_length", 16] if text else ["--loader", "memory"]
    words = [quick_python.commands() / "python", "train.py", *flags]
    environment = user_environment | {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/mine" / ("text" if text else "mnist") / "summary.json").exists()
    assert [file.name for file in folder.iterdir()] == ["train.py"]


def test_a_lesson_is_a_folder_with_a_page_a_script_and_a_job() -> None:
    lessons = list(REPOSITORY.glob("0*"))
    assert len(lessons) >= 5
    for lesson in lessons:
        assert {"README.md", "train.py", "job.slurm"} <= {file.name for file in lesson.iterdir()}


# A copy is a promise: what has one name in two scripts is the same to the letter.

OF_THE_LESSON = {
    *("Config", "Training", "make_loader", "make_model", "make_optimizer", "train_step"),
    *("train_one_epoch", "evaluate", "save", "resume", "main", "train"),
}
"""what each lesson writes anew, because it is its subject; still, the arguments are the same in all lessons"""


def definitions(lesson: str, script: str = "train.py") -> dict[str, tuple[str, str]]:
    """Functions and classes of a script by name: their text, and of functions the arguments by name and kind."""
    source = (REPOSITORY / lesson / script).read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
            arguments = ""
            if isinstance(node, ast.FunctionDef):
                names = [one.arg for one in node.args.args]
                arguments = ", ".join([*names, *(f"{one.arg}=" for one in node.args.kwonlyargs)])
            found[node.name] = (text, arguments)
    return found


@pytest.mark.parametrize("name", sorted({name for lesson in LESSONS for name in definitions(lesson)}))
def test_a_definition_with_one_name_in_two_scripts_is_one(name: str) -> None:
    having = {lesson: definitions(lesson)[name] for lesson in LESSONS if name in definitions(lesson)}
    first, *others = having
    for other in others:
        places = f"{first}/train.py and {other}/train.py"
        if name not in OF_THE_LESSON:
            assert having[first][0] == having[other][0], f"{name} differs in {places}: change both, or rename one"
        else:
            assert having[first][1] == having[other][1], f"{name} has other arguments in {places}"


def test_the_script_for_own_tokens_is_the_script_of_lesson_05_but_for_what_it_replaces() -> None:
    lesson, example = definitions("05_fully_sharded"), definitions("05_fully_sharded", "own_tokens/train.py")
    differing = {name for name in lesson if example.get(name) != lesson[name]}
    assert differing == {"Config", "make_loader", "train", "log_text", "write_text"}
    assert example.keys() - lesson.keys() == {"token_file", "TokenFile"}


def test_the_example_for_spectra_is_the_script_of_lesson_01_but_for_what_it_replaces() -> None:
    lesson, example = definitions("01_single_gpu"), definitions("01_single_gpu", "experiments/spectra.py")
    differing = {name for name in lesson if example.get(name) != lesson[name]}
    assert differing == {"Config", "make_loader", "train_one_epoch", "evaluate", "train"}

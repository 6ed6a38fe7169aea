"""What a lesson teaches stands in its train.py: its calls are found in the syntax tree, where comments do not count.

A call is described as it is written: `optim.*` stands for any name at that place, a name that begins with a dot for any
object in front of it, and keywords in parentheses for arguments that must be given by these names.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from conftest import REPOSITORY

TRAINING_LOOP = (
    "DataLoader(batch_sampler, num_workers, pin_memory, persistent_workers, prefetch_factor)",
    "torch.optim.SGD()",
    "torch.optim.Adam()",
    "torch.optim.AdamW()",
    "torch.optim.Adadelta()",
    ".to(non_blocking)",
    "F.cross_entropy()",
    ".backward()",
    ".zero_grad()",
    ".train()",
    ".eval()",
    "torch.inference_mode()",
    "torch.manual_seed()",
    "record_function()",
    ".step()",
    ".state_dict()",
    ".load_state_dict()",
    "run.load_checkpoint()",
    "run.save()",
)
"""of lesson 01, and of all that build on it"""
ONE_OPTIMIZER = ("optimizer.step()", "optimizer.zero_grad()", "loss.backward()", "scheduler.step()", "StepLR()")
RANKS = (
    *(f'"{name}"' for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
    *(f'"{name}"' for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")),
    "torch.cuda.set_device()",
    "dist.init_process_group(backend, rank, world_size)",
    "DistributedBatchSampler(rank, num_replicas, shuffle)",
    ".set_epoch()",
    "DistributedDataParallel()",
    ".no_sync()",
    "if rank == 0",
    "dist.all_reduce()",
    "dist.destroy_process_group()",
)
NOT_SHARDED = ("DistributedDataParallel()", ".no_sync()", "torch.inference_mode()")
"""what other calls take the place of where the model is sharded"""
CALLS = {
    "01_single_gpu": (*TRAINING_LOOP, *ONE_OPTIMIZER),
    "02_dataparallel": (*TRAINING_LOOP, *ONE_OPTIMIZER, "nn.DataParallel()", ".module"),
    "03_ddp": (*TRAINING_LOOP, *ONE_OPTIMIZER[:-1], "LambdaLR()", *RANKS, ".module"),
    "04_mixed_precision": (
        *TRAINING_LOOP,
        *RANKS,
        "LambdaLR()",
        "scaler.scale()",
        "scaler.step()",
        "scaler.update()",
        "torch.backends.cudnn.allow_tf32 = ",
        "torch.backends.cudnn.benchmark = ",
        "torch.set_float32_matmul_precision()",
        "torch.autocast()",
        "torch.amp.GradScaler()",
        "torch.channels_last",
        "torch.optim.SGD(fused)",
        "torch.optim.Adam(fused)",
        "torch.optim.AdamW(fused)",
        "torch.compile()",
        "torch.cuda.CUDAGraph()",
        "torch.cuda.graph()",
        ".replay()",
    ),
}
CALLS["05_fully_sharded"] = (
    *(call for call in (*TRAINING_LOOP, *RANKS) if call not in NOT_SHARDED),
    *(call for call in CALLS["04_mixed_precision"] if call.startswith(("scaler.", "torch.backends.", "torch.optim."))),
    "LambdaLR()",
    "torch.set_float32_matmul_precision()",
    "torch.amp.GradScaler()",
    ".compile()",
    "init_device_mesh()",
    "torch.device()",
    '"meta"',
    "fully_shard(mesh, mp_policy, reshard_after_forward)",
    "MixedPrecisionPolicy(param_dtype, reduce_dtype)",
    ".to_empty(device)",
    ".set_requires_gradient_sync()",
    "nn.utils.clip_grad_norm_()",
    "scaler.unscale_()",
    "checkpoint(use_reentrant)",
    "block.forward = ",
    "dcp.save(checkpoint_id, process_group)",
    "dcp.async_save(checkpoint_id, process_group)",
    "dcp.load(checkpoint_id, process_group)",
    "torch.no_grad()",
    "StateDictOptions(full_state_dict, broadcast_from_rank0)",
    "get_model_state_dict(options)",
    "set_model_state_dict(options)",
    "get_optimizer_state_dict(options)",
    "set_optimizer_state_dict(options)",
)
SCRIPTS = {lesson: (REPOSITORY / lesson / "train.py").read_text() for lesson in CALLS}


def found_in(source: str) -> set[str]:
    """Everything in a script that a description can name: names with dots, constants, assignments and conditions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(ast.unparse(node))
            if isinstance(node, ast.Attribute):
                found.add(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(f'"{node.value}"')
        elif isinstance(node, ast.Assign):
            found |= {f"{ast.unparse(target)} = " for target in node.targets}
        elif isinstance(node, ast.If):
            found.add(f"if {ast.unparse(node.test)}")
    return found


def calls_in(source: str) -> Iterator[tuple[str, set[str]]]:
    """Every call: the name that is called, also without the object in front of it, and the keywords."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
            yield ast.unparse(node.func), keywords
            if isinstance(node.func, ast.Attribute):
                yield f".{node.func.attr}", keywords


def missing(source: str, described: tuple[str, ...]) -> list[str]:
    """Return which of the things described are not in the source."""
    names, calls = found_in(source), list(calls_in(source))
    absent = []
    for description in described:
        call = re.fullmatch(r"([\w.]+)\((.*)\)", description)
        if call:
            name, keywords = call[1], {word.strip() for word in call[2].split(",") if word.strip()}
            present = any(name == called and keywords <= given for called, given in calls)
        else:
            present = description in names
        if not present:
            absent.append(description)
    return absent


@pytest.mark.parametrize("lesson", CALLS)
def test_the_calls_of_a_lesson_stand_in_its_script(lesson: str) -> None:
    assert missing(SCRIPTS[lesson], CALLS[lesson]) == []


@pytest.mark.parametrize("lesson", CALLS)
@pytest.mark.parametrize("as_comment", [False, True], ids=["removed", "only a comment"])
def test_a_call_that_is_missing_is_noticed(lesson: str, as_comment: bool) -> None:
    """Each of them, one at a time: what is described is renamed, or what it stands in becomes a comment."""
    for description in CALLS[lesson]:
        name = re.split(r"[(]", description)[0].strip('"').removeprefix("if ").removesuffix(" = ")
        last = name.rpartition(".")[2]
        changed = re.sub(rf"\b{re.escape(last)}\b", "something_else", SCRIPTS[lesson])
        if as_comment:
            changed += f'# {description} and {name}(...) and "{name}" and if {name}\n'
        assert description in missing(changed, CALLS[lesson]), description


def test_a_keyword_that_is_missing_is_noticed() -> None:
    source = SCRIPTS["01_single_gpu"]
    for keyword in ("batch_sampler", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor"):
        changed = re.sub(rf"^        {keyword}=.*,\n", "", source, flags=re.MULTILINE)
        assert changed != source
        assert missing(changed, CALLS["01_single_gpu"]) == [TRAINING_LOOP[0]]


@pytest.mark.parametrize("lesson", CALLS)
def test_what_is_called_is_what_pytorch_has_under_this_name(lesson: str) -> None:
    """`DataLoader` and others are imported from torch, not from the package."""
    origin = {}
    for node in ast.walk(ast.parse(SCRIPTS[lesson])):
        if isinstance(node, ast.ImportFrom):
            origin |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Import):
            origin |= {alias.asname or alias.name: alias.name for alias in node.names}
    called = {name.partition(".")[0] for name, _ in calls_in(SCRIPTS[lesson])}
    of_pytorch = {"DataLoader", "DistributedDataParallel", "LambdaLR", "StepLR", "record_function"}
    of_pytorch |= {"F", "dist", "nn", "torch"}
    assert all(origin[name].partition(".")[0] == "torch" for name in of_pytorch & called)
    assert {"torch", "F", "DataLoader", "record_function"} <= called

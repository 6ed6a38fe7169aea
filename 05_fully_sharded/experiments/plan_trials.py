"""Steps of lesson 05's train.py on null GPUs: how much of a batch fits on each GPU, and how long a step takes.

Used by plan.py. A run is rank 0 of the job; the other ranks do not exist. PyTorch's own allocator counts the bytes, and
the clock of the null GPU (tools/nullgpu/docs/clock.md) the seconds.
"""

import argparse
import atexit
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.simulated import null_gpu
from workshop.errors import UserError
from workshop.jsonfile import write_json
from workshop.models.gpt import SIZES, GPTSize, gpt_size
from workshop.paths import default_data_dir

LESSON = Path(__file__).resolve().parents[1]
GIB = 2**30
GAPS = 1.07
"""what is reserved, on a GPU, for each byte that null GPUs reserve: at most that on an H200 (experiments/memory.md)"""
NOT_COUNTED = 3 * GIB
"""CUDA's context and NCCL's buffers, which no allocator counts: 0.5 to 2 GiB and about 1 GiB"""
HOST = 3
"""how many times as fast as this machine the host counts: nodes with GPUs have other CPUs than the machine of the plan,
and a plan should be the same on a busy laptop; what the host needs is said apart. A simulated second of waiting then
takes three real ones"""
ATTEMPTS = 4
"""of a trial whose loss is not finite"""
AT_ONCE = 3
"""ways that are tried at the same time: their runs wait most of the time"""
LAUNCH = 10e-6
"""seconds of the host for a kernel, with all that leads to it: 6 to 15 µs are usual for eager PyTorch"""
SKIP, COUNTED = 3, 2
"""updates of a simulated run: the first ones, in which the clock learns the durations, and those that count"""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of the training."""

    kind: str
    """as nullgpu knows it, or a file"""
    gib: float
    nodes: int
    per_node: int
    peak: float
    """dense FLOP/s in 16 bits"""
    sixteen: str
    """bf16, or fp16 if it has no bf16"""
    sm: int
    between: float = 0.0
    """bus bandwidth between nodes, bytes/s"""
    within: float = 0.0
    """and within a node"""

    @property
    def number(self) -> int:
        """Number of all GPUs."""
        return self.nodes * self.per_node

    @property
    def name(self) -> str:
        """What the answer calls them."""
        return f"{self.number:,} x {self.short.upper()} of {self.gib:g} GiB"

    @property
    def short(self) -> str:
        """The name of the GPU without its memory, or of a file."""
        return Path(self.kind).stem.removesuffix("_40")


@dataclass(frozen=True)
class Model:
    """A model of the lesson, and what it is trained on."""

    flags: tuple[str, ...]
    """--model, and --width, --depth and --vocabulary if they differ"""
    size: GPTSize
    sequence_length: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.size.parameters


@dataclass(frozen=True)
class Way:
    """How the model is shared, and a batch divided; with what null GPUs have found."""

    shard: str
    replicas: int = 1
    recomputed: bool = False
    part: int = 0
    """sequences that a GPU computes at once; 0: not one of them fits"""
    parts: int = 0
    """of a GPU's share of a batch"""
    needed: float = 0.0
    """bytes of a GPU, with gaps and what is not counted; of one sequence, if that does not fit"""
    allocated: float = 0.0
    """bytes at the peak"""
    reserved: float = 0.0
    """bytes that the allocator holds at the peak, with its gaps"""
    launches: float = 0.0
    """kernels that the host launches in a step"""
    seconds: float = 0.0
    """of a step, simulated"""
    busy: float = 0.0
    """share of the step in which the GPU computes"""
    waits: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the table of ways shows."""
        kind = "none (DDP)" if self.shard == "none" else self.shard
        groups = f" --replicas {self.replicas}" if self.replicas > 1 else ""
        return f"{kind}{groups}{', recomputed' if self.recomputed else ''}"

    @property
    def host_seconds(self) -> float:
        """About what the host needs to launch a step (rule)."""
        return LAUNCH * self.launches

    def flags(self, parts: int) -> list[str]:
        """Return the flags of train.py."""
        replicas = ["--replicas", str(self.replicas)] if self.replicas > 1 else []
        again = ["--activation_checkpointing", "true"] if self.recomputed else []
        several = ["--accumulate", str(parts)] if parts > 1 else []
        if several and self.shard != "none":  # else each GPU holds the gradients of the whole model
            several += ["--reduce_each_part", "true"]
        return ["--shard", self.shard, *replicas, *again, *several]


def model_of(weights: float, sequence_length: int, vocabulary: int | None = None) -> Model:
    """Return the model of the lesson with about so many weights: a width and a depth as published models have them.

    GPT-2, Pythia, LLaMA and MPT have 64 (124M) to 128 (7B and more) times as much width as depth; the ratio here goes
    from one to the other with the logarithm of the size.
    """
    base = "gpt2_124m" if weights < 5e8 else "gpt_1b" if weights < 3e9 else "gpt_7b"
    wanted = 64 * 2 ** min(1.0, max(0.0, math.log(weights / 124e6) / math.log(7e9 / 124e6)))
    step = 2 * SIZES[base].head_dimension
    widths, depths = range(step, 16_385, step), range(2, 129)
    sizes = [gpt_size(base, width, depth, vocabulary) for width in widths for depth in depths]

    def distance(size: GPTSize) -> float:
        """A wrong number of weights counts ten times as much as a wrong shape."""
        shape = abs(math.log(size.width / size.depth / wanted))
        return 10 * abs(math.log(size.parameters / weights)) + shape

    best = min(sizes, key=distance)
    if not 0.8 < best.parameters / weights < 1.25:
        near = [min(size.parameters for size in sizes), max(size.parameters for size in sizes)]
        raise UserError(f"--weights {weights:g}: the lesson's models have {near[0]:.2g} to {near[1]:.2g} of them")
    flags = ("--model", base, "--width", str(best.width), "--depth", str(best.depth))
    return Model((*flags, *vocabulary_flags(vocabulary)), best, sequence_length)


def vocabulary_flags(vocabulary: int | None) -> tuple[str, ...]:
    """Return the flags of train.py for a vocabulary of the user's own."""
    return ("--vocabulary", str(vocabulary)) if vocabulary else ()


def gpus_of(arguments: argparse.Namespace) -> Gpus:
    """Ask the null GPU for the figures of a GPU; `UserError` if it knows none of this name."""
    kind = arguments.gpu
    if Path(kind).is_file():
        kind = str(Path(kind).resolve())
    elif kind == "a100" and arguments.gb == 40:  # has another memory, too
        kind = "a100_40"
    if arguments.network:
        kind = with_network(kind, 1e9 * arguments.network)
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch, "gpu.json")
        command = [*null_gpu("--clock", kind, "--json", figures), sys.executable, "-c", "pass"]
        done = subprocess.run(command, capture_output=True, text=True)
        if not figures.exists():
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise UserError(f"--gpu {arguments.gpu}: nullgpu ended with status {done.returncode}: {' '.join(said)}")
        settings = json.loads(figures.read_text())["settings"]
    sixteen = "bf16" if settings["sm"] >= 80 else "fp16"
    return Gpus(
        kind=kind,
        gib=arguments.gb or settings["gb"],
        nodes=arguments.nodes,
        per_node=arguments.gpus_per_node,
        peak=settings["peak"][sixteen],
        sixteen=sixteen,
        sm=settings["sm"],
        between=settings["network_between"],
        within=settings["network_inside"],
    )


def with_network(kind: str, bandwidth: float) -> str:
    """Write a file for a GPU with another bandwidth between nodes; return its path, until this process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    file = Path(folder, f"{Path(kind).stem}.toml")
    file.write_text(f"like = {json.dumps(kind)}\n[clock.between]\nbandwidth = {bandwidth}\n")
    return str(file)


WITHOUT_DRAWING = """
import runpy, sys
import torch.nn.init as init
for name in ("normal_", "trunc_normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "ones_", "zeros_"):
    setattr(init, name, lambda tensor, *args, **named: tensor)
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""starts a script whose weights are not drawn: null GPUs compute nothing, and they would fill this machine's memory"""


def empty_file(path: Path, size: int) -> None:
    """Make a file of zeros that takes no place on the disk."""
    with path.open("wb") as file:
        file.truncate(size)


class Trials:
    """Runs of a copy of lesson 05's train.py on null GPUs, as rank 0 of the job."""

    def __init__(self, script: Path, model: Model, gpus: Gpus, extra: list[str], folder: Path) -> None:
        self.script, self.model, self.gpus, self.extra, self.folder = script.resolve(), model, gpus, extra, folder
        self.of_lesson = self.script == LESSON / "train.py"

    def run(self, way: Way, part: int, parts: int, steps: int, options: list[object]) -> dict[str, Any]:
        """Make some steps of so many parts of so many sequences; return the figures of nullgpu's reports.

        A null GPU computes no loss: what is read may be left of something else, and by chance not finite.
        """
        for attempt in range(ATTEMPTS):
            try:
                return self.run_once(way, part, parts, steps, options)
            except UserError as error:
                if "is not finite" not in str(error) or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def run_once(self, way: Way, part: int, parts: int, steps: int, options: list[object]) -> dict[str, Any]:
        """Make these steps; return the figures."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        figures, run = folder / "figures.json", folder / "run"
        batch, gpus = part * parts * self.gpus.number, self.gpus
        data = ["--data_dir", str(self.data(folder, steps * batch))]
        command = [
            *null_gpu("--gpus", gpus.per_node, "--world", gpus.number, "--json", figures, *options),
            *(sys.executable, "-c", WITHOUT_DRAWING, self.script.name),
            *(*self.model.flags, "--sequence_length", self.model.sequence_length, "--precision", gpus.sixteen),
            *("--global_batch_size", batch, "--limit_train", steps * batch, "--limit_val", gpus.number),
            *("--num_workers", 0, "--run_dir", run, *data, *way.flags(parts), *self.extra),
        ]
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=self.script.parent, capture_output=True, text=True)
        found = json.loads(figures.read_text()) if figures.exists() else None
        shutil.rmtree(folder)
        if done.returncode or found is None:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            errors = [line for line in lines if "rror" in line] or lines
            raise UserError(f"{self.script.name} {' '.join(words[words.index('--precision') :])}: {errors[-1]}")
        return found

    def data(self, folder: Path, sequences: int) -> Path:
        """Make a folder a data directory that is large enough for the trials: tokens of zeros, without content.

        It has the text of the lesson, and for a script of one's own the files of tokens that docs/64_gpus.md describes,
        and links to whatever else lies in the data directory.
        """
        text = folder / "text"
        text.mkdir()
        length = sequences * (self.model.sequence_length + 1) + self.model.sequence_length
        lengths = {"train.bin": length, "val.bin": (self.gpus.number + 1) * (self.model.sequence_length + 1)}
        for name, size in lengths.items():
            empty_file(text / name, size)
        write_json(text / "ORIGIN.json", {"lengths": lengths})
        if not self.of_lesson:
            for name, size in lengths.items():
                for kind, width in (("uint16", 2), ("uint32", 4)):
                    empty_file(folder / f"{Path(name).stem}.{kind}", size * width)
            own = default_data_dir()
            for file in own.iterdir() if own.is_dir() else ():
                if not (folder / file.name).exists():
                    (folder / file.name).symlink_to(file)
        return folder

    def memory(self, way: Way, part: int, parts: int) -> Way:
        """Return the way with these parts, and its memory. Two parts are enough: later ones need no more."""
        options = [
            "--gb",
            4000,
            "--sm",
            self.gpus.sm,
            "--report",
            "--snapshot",
            self.folder / f"{way.shard}_{way.replicas}_{way.recomputed}_{part}.pickle",
        ]
        (rank,) = self.run(way, part, min(parts, 2), 3, options)["report"]["ranks"]
        needed = GAPS * rank["reserved"] + NOT_COUNTED
        launches = rank["step"]["launches"] * max(1.0, parts / 2)
        found = {"allocated": rank["peak"], "reserved": rank["reserved"], "needed": needed, "launches": launches}
        return replace(way, part=part, parts=parts, **found)

    def time(self, way: Way, part: int, parts: int) -> tuple[float, float, dict[str, float]]:
        """Return the simulated seconds of a step, the share in which the GPU computes, and what it waits for."""
        options = ["--gb", 4000, "--clock", self.gpus.kind, "--host", HOST, "--skip", SKIP]
        found = [
            self.run(way, part, number, SKIP + COUNTED, options)["clock"]["ranks"][0]
            for number in ([1, 2] if parts > 2 else [parts])
        ]
        one, last = found[0], found[-1]
        # Every further part costs the same, and at least the time of its kernels, which does not depend on the host.
        kernels = last["seconds"] * last["busy"] - one["seconds"] * one["busy"]
        further = max(last["seconds"] - one["seconds"], kernels)
        seconds = last["seconds"] + (parts - 2) * further if parts > 2 else last["seconds"]
        return seconds, last["busy"], last["waits"]


def divisors(number: int) -> list[int]:
    """Return the numbers that divide this one, the largest first."""
    return [part for part in range(number, 0, -1) if number % part == 0]


def fitted(trials: Trials, way: Way, sequences: int) -> Way:
    """Return the way with its largest part of a GPU's sequences that fits, so that all parts are equal."""
    limit = trials.gpus.gib * GIB
    one = trials.memory(way, 1, sequences)
    if one.needed > limit:
        return replace(one, part=0, parts=0)
    # DDP's first buckets are freed before or after the peak, by chance (tools/nullgpu/README.md): 4 bytes a weight
    chance = GAPS * 4 * trials.model.weights if way.shard == "none" else 0.0
    slope = max(trials.memory(way, 2, max(2, sequences // 2)).needed - one.needed, 1.0) if sequences > 1 else 1.0
    slope = max(slope - chance, 1.0)
    sizes = [part for part in divisors(sequences) if one.needed + (part - 1) * slope <= 1.02 * limit + chance]
    for part in sizes:  # memory grows nearly, but not exactly, in proportion
        found = trials.memory(way, part, sequences // part) if part > 1 else one
        if chance and found.needed <= limit:
            again = trials.memory(way, part, sequences // part)
            found = max(found, again, key=lambda way: way.needed)
        if found.needed <= limit or part == 1:
            return found
    raise AssertionError("one sequence fits")


def ways_of(model: Model, gpus: Gpus) -> Iterator[list[Way]]:
    """Yield the ways worth trying: first those that compute nothing twice, then those that recompute."""
    for recomputed in (False, True):
        ways = [Way("none", recomputed=recomputed)]
        if gpus.number > 1:
            ways.append(Way("blocks", recomputed=recomputed))
        if gpus.nodes > 1 and gpus.per_node > 1:
            ways.append(Way("blocks", replicas=gpus.nodes, recomputed=recomputed))
        yield [way for way in ways if stored_bytes(model, gpus, way) < gpus.gib * GIB]


def stored_bytes(model: Model, gpus: Gpus, way: Way) -> float:
    """Return a lower bound of what a GPU needs: weights, gradients and Adam's two means in float32."""
    ranks = 1 if way.shard == "none" else gpus.number // way.replicas
    return 16 * model.weights / ranks


def tried(trials: Trials, sequences: int) -> list[Way]:
    """Return the ways with their memory and, if they fit, seconds; recomputing is tried if without it parts are small.

    *Small* is less than 4,096 tokens at once: then the weights are gathered often, and kernels are short.
    """
    found: list[Way] = []
    for group in ways_of(trials.model, trials.gpus):
        large = [way for way in found if way.part * trials.model.sequence_length >= 4096 or way.part == sequences]
        if large:
            break
        say(f"trying --shard {'; '.join(way.name for way in group)} ...")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found += pool.map(lambda way: timed(trials, fitted(trials, way, sequences)), group)
    return found


def smallest(trials: Trials, best: Way, sequences: int) -> tuple[int, Way] | None:
    """Return the smallest number of GPUs of a node on which a step of the best way fits, and the way with its parts.

    Fewer GPUs hold more of the weights each, so their parts may be smaller. The whole job is not meant: None if it has
    no smaller number.
    """
    gpus = trials.gpus
    rest = best.needed - GAPS * stored_bytes(trials.model, gpus, best)  # nearly as much on any number of GPUs
    for number in sorted({1, 2, gpus.per_node}):
        if number > gpus.per_node or number == gpus.number:
            continue
        fewer = Trials(
            trials.script, trials.model, replace(gpus, nodes=1, per_node=number), trials.extra, trials.folder
        )
        way = replace(best, replicas=1)
        for part in divisors(best.part):
            guess = GAPS * stored_bytes(trials.model, fewer.gpus, way) + rest * part / best.part
            if guess > gpus.gib * GIB:
                continue
            found = fewer.memory(way, part, sequences // part)
            if found.needed <= gpus.gib * GIB:
                return number, found
    return None


def timed(trials: Trials, way: Way) -> Way:
    """Return a way with its simulated time, if a part of it fits."""
    if not way.part:
        return way
    seconds, busy, waits = trials.time(way, way.part, way.parts)
    return replace(way, seconds=seconds, busy=busy, waits=waits)


def say(line: str) -> None:
    """Print what is being done."""
    print(line, file=sys.stderr, flush=True)

"""From a model, its tokens and your GPUs to flags, memory, seconds per step and GPU-hours. Nothing needs a GPU.

    python experiments/plan.py --model gpt_1b --gpu a100 --nodes 8                     # on 20 tokens for each weight
    python experiments/plan.py --weights 13e9 --gpu a100 --gb 40 --nodes 2 --tokens 100e9 --hours 240
    python experiments/plan.py --weights 300e6 --gpu l4 --gpus_per_node 1 --sequence_length 1024
    python experiments/plan.py --published true                      # ten answers beside what others have measured

For each way of sharing the model over the GPUs, the lesson's train.py makes some steps on null GPUs (tools/nullgpu):
PyTorch's own allocator counts the bytes, and the simulated GPU the seconds. From these the plan chooses the fastest way
that fits, and the largest part of a batch. It takes one to five minutes. Every line of the answer says whether its
figure is counted, simulated, published or a rule. A plan is a beginning: measure it on one node before you believe it.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_cost import BYTES_PER_PARAMETER, GPU_HOURS_PER_FAILURE, best_interval
from lab import results
from lab.flags import Parser
from lab.simulated import null_gpu
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors
from workshop.jsonfile import write_json
from workshop.models.gpt import SIZES, GPTSize, gpt_size

LESSON = Path(__file__).resolve().parents[1]
GIB = 2**30
TOKENS_PER_WEIGHT = 20
"""about what uses a number of operations best: Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, table A3"""
GAPS = 1.07
"""what is reserved, on a GPU, for each byte that null GPUs reserve: at most that on an H200 (experiments/memory.md)"""
NOT_COUNTED = 3 * GIB
"""CUDA's context and NCCL's buffers, which no allocator counts: 0.5 to 2 GiB and about 1 GiB"""
USUAL_SHARE = (0.33, 0.40)
"""of the peak that a training of a language model reaches: torchtitan's Llama 3.1 8B on H100
(benchmarks/llama3_h100_202412_torchtitan.md), and MosaicML's table below"""
SKIP, COUNTED = 4, 3
"""updates of a simulated run: the first ones, in which the clock learns the durations, and those that count"""
GB_PER_SECOND = 1.0
"""that all ranks together write, on a file system that is not fast"""


@dataclass(frozen=True)
class Recipe:
    """What a published training has used. Its gradients were clipped at 1, its weights decayed by 0.1, its betas 0.9
    and 0.95, and its learning rate went down to a tenth after the warm-up, along a cosine."""

    source: str
    weights: float
    tokens_per_step: float
    lr: float
    warmup_steps: int


RECIPES = (
    Recipe("nanoGPT, config/train_gpt2.py", 124e6, 0.49e6, 6.0e-4, 2000),
    Recipe("GPT-3 350M (arXiv:2005.14165, table 2.1)", 350e6, 0.5e6, 3.0e-4, 750),
    Recipe("Pythia 410M, models/410M/pythia-410m.yml", 410e6, 2.1e6, 3.0e-4, 1430),
    Recipe("Pythia 1B, models/1B/pythia-1b.yml", 1.0e9, 2.1e6, 2.5e-4, 1430),
    Recipe("GPT-3 1.3B (arXiv:2005.14165, table 2.1)", 1.3e9, 1.0e6, 2.0e-4, 375),
    Recipe("GPT-3 2.7B (arXiv:2005.14165, table 2.1)", 2.7e9, 1.0e6, 1.6e-4, 375),
    Recipe("LLaMA 7B (arXiv:2302.13971, table 2)", 6.7e9, 4.2e6, 3.0e-4, 2000),
    Recipe("LLaMA 13B (arXiv:2302.13971, table 2)", 13.0e9, 4.2e6, 3.0e-4, 2000),
    Recipe("LLaMA 33B (arXiv:2302.13971, table 2)", 32.5e9, 4.2e6, 1.5e-4, 2000),
)
"""docs/64_gpus.md has more of them, for comparison; GPT-3's warm-up is 375 million tokens"""


@dataclass(frozen=True)
class Measured:
    """A published speed."""

    name: str
    size: GPTSize
    gpu: str
    gb: int
    gpus: int
    part: int
    """sequences of 2,048 tokens that a GPU computes at once"""
    recomputed: bool
    share_of_peak: float


def mpt(width: int, depth: int) -> GPTSize:
    """Return the size of one of MosaicML's models. Its blocks have 12 x width² weights, as those of this lesson."""
    return GPTSize(width=width, depth=depth, vocabulary=50_432, head_dimension=128)


PUBLISHED = (
    Measured("125M", mpt(768, 12), "a100", 80, 8, 32, False, 0.4445),
    Measured("1.3B", mpt(2048, 24), "a100", 80, 8, 14, False, 0.5986),
    Measured("2.7B", mpt(2560, 32), "a100", 80, 8, 10, False, 0.6211),
    Measured("6.7B", mpt(4096, 32), "a100", 80, 8, 6, False, 0.6423),
    Measured("6.7B", mpt(4096, 32), "a100", 40, 64, 18, True, 0.5073),
    Measured("13B", mpt(5120, 40), "a100", 40, 16, 10, True, 0.5250),
    Measured("1.3B", mpt(2048, 24), "h100", 80, 64, 20, False, 0.4085),
    Measured("2.7B", mpt(2560, 32), "h100", 80, 64, 6, False, 0.4080),
    Measured("6.7B", mpt(4096, 32), "h100", 80, 8, 6, False, 0.4644),
    Measured("13B", mpt(5120, 40), "h100", 80, 64, 2, False, 0.3986),
)
"""MosaicML's llm-foundry, scripts/train/benchmarking/README.md, rows of 2,048 tokens in bf16, fully sharded. Their
models have 4 x width in the MLP without a gate, LayerNorm and ALiBi, so the same weights and nearly the same products;
on A100 (PURE) also gradients and optimizer state are in 16 bits. https://github.com/mosaicml/llm-foundry"""


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

    @property
    def number(self) -> int:
        """Number of all GPUs."""
        return self.nodes * self.per_node

    @property
    def name(self) -> str:
        """What the answer calls them."""
        return f"{self.number:,} x {Path(self.kind).stem.upper()} of {self.gib:g} GiB"


@dataclass(frozen=True)
class Model:
    """A model of the lesson, and what it is trained on."""

    flags: tuple[str, ...]
    """--model, and --width and --depth if they differ"""
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
    seconds: float = 0.0
    """of a step, simulated"""
    busy: float = 0.0
    """share of the step in which the GPU computes"""
    waits: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the table of ways shows."""
        kind = "none (DDP)" if self.shard == "none" else self.shard
        groups = f", {self.replicas} groups" if self.replicas > 1 else ""
        return f"{kind}{groups}{', recomputed' if self.recomputed else ''}"

    def flags(self, parts: int) -> list[str]:
        """Return the flags of train.py."""
        replicas = ["--replicas", str(self.replicas)] if self.replicas > 1 else []
        again = ["--activation_checkpointing", "true"] if self.recomputed else []
        return ["--shard", self.shard, *replicas, *again, *(["--accumulate", str(parts)] if parts > 1 else [])]


def model_of(weights: float, sequence_length: int) -> Model:
    """Return the model of the lesson with about so many weights: a width and a depth as published models have them.

    GPT-2, Pythia, LLaMA and MPT have 64 (124M) to 128 (7B and more) times as much width as depth; the ratio here goes
    from one to the other with the logarithm of the size.
    """
    base = "gpt2_124m" if weights < 5e8 else "gpt_1b" if weights < 3e9 else "gpt_7b"
    wanted = 64 * 2 ** min(1.0, max(0.0, math.log(weights / 124e6) / math.log(7e9 / 124e6)))
    step = 2 * SIZES[base].head_dimension
    sizes = [gpt_size(base, width, depth) for width in range(step, 16_385, step) for depth in range(2, 129)]

    def distance(size: GPTSize) -> float:
        """A wrong number of weights counts ten times as much as a wrong shape."""
        shape = abs(math.log(size.width / size.depth / wanted))
        return 10 * abs(math.log(size.parameters / weights)) + shape

    best = min(sizes, key=distance)
    if not 0.8 < best.parameters / weights < 1.25:
        near = [min(size.parameters for size in sizes), max(size.parameters for size in sizes)]
        raise UserError(f"--weights {weights:g}: the lesson's models have {near[0]:.2g} to {near[1]:.2g} of them")
    flags = ("--model", base, "--width", str(best.width), "--depth", str(best.depth))
    return Model(flags, best, sequence_length)


def gpus_of(arguments: argparse.Namespace) -> Gpus:
    """Ask the null GPU for the figures of a GPU; `UserError` if it knows none of this name."""
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch, "gpu.json")
        command = [*null_gpu("--clock", arguments.gpu, "--json", figures), sys.executable, "-c", "pass"]
        done = subprocess.run(command, capture_output=True, text=True)
        if not figures.exists():
            raise UserError(f"--gpu {arguments.gpu}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        settings = json.loads(figures.read_text())["settings"]
    sixteen = "bf16" if settings["sm"] >= 80 else "fp16"
    return Gpus(
        kind=str(Path(arguments.gpu).resolve()) if Path(arguments.gpu).is_file() else arguments.gpu,
        gib=arguments.gb or settings["gb"],
        nodes=arguments.nodes,
        per_node=arguments.gpus_per_node,
        peak=settings["peak"][sixteen],
        sixteen=sixteen,
        sm=settings["sm"],
    )


WITHOUT_DRAWING = """
import runpy, sys
import torch.nn.init as init
for name in ("normal_", "trunc_normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "ones_", "zeros_"):
    setattr(init, name, lambda tensor, *args, **named: tensor)
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""starts a script whose weights are not drawn: a null GPU computes nothing, and they would fill this machine's memory"""


class Trials:
    """Runs of a copy of lesson 05's train.py on null GPUs, as rank 0 of the job."""

    def __init__(self, script: Path, model: Model, gpus: Gpus, extra: list[str], folder: Path) -> None:
        self.script, self.model, self.gpus, self.extra, self.folder = script.resolve(), model, gpus, extra, folder
        self.of_lesson = self.script == LESSON / "train.py"

    def run(self, way: Way, part: int, parts: int, steps: int, options: list[object]) -> dict[str, Any]:
        """Make some steps of so many parts of so many sequences; return the figures of nullgpu's reports."""
        figures, run = self.folder / "figures.json", self.folder / "run"
        figures.unlink(missing_ok=True)
        batch, gpus = part * parts * self.gpus.number, self.gpus
        data = ["--data_dir", str(self.text(steps * batch))] if self.of_lesson else []
        command = [
            *null_gpu("--gpus", gpus.per_node, "--world", gpus.number, "--json", figures, *options),
            *(sys.executable, "-c", WITHOUT_DRAWING, self.script.name),
            *(*self.model.flags, "--sequence_length", self.model.sequence_length, "--precision", gpus.sixteen),
            *("--global_batch_size", batch, "--limit_train", steps * batch, "--limit_val", gpus.number),
            *("--num_workers", 0, "--run_dir", run, *data, *way.flags(parts), *self.extra),
        ]
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=self.script.parent, capture_output=True, text=True)
        subprocess.run(["rm", "-rf", str(run)], check=True)
        if done.returncode or not figures.exists():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            errors = [line for line in lines if "rror" in line] or lines
            raise UserError(f"{self.script.name} {' '.join(words[words.index('--precision') :])}: {errors[-1]}")
        return json.loads(figures.read_text())

    def text(self, sequences: int) -> Path:
        """Return a data directory with a text of zeros that is long enough, as a file without content."""
        text = self.folder / "text"
        text.mkdir(exist_ok=True)
        length = sequences * (self.model.sequence_length + 1) + self.model.sequence_length
        lengths = {"train.bin": length, "val.bin": (self.gpus.number + 1) * (self.model.sequence_length + 1)}
        for name, size in lengths.items():
            with (text / name).open("wb") as file:
                file.truncate(size)
        write_json(text / "ORIGIN.json", {"lengths": lengths})
        return self.folder

    def memory(self, way: Way, part: int, parts: int) -> tuple[float, float]:
        """Return the bytes at the peak, and those that a GPU needs. Two parts are enough: later ones need no more."""
        options = ["--gb", 4000, "--sm", self.gpus.sm, "--report", "--snapshot", self.folder / "memory.pickle"]
        (rank,) = self.run(way, part, min(parts, 2), 3, options)["report"]["ranks"]
        return rank["peak"], GAPS * rank["reserved"] + NOT_COUNTED

    def time(self, way: Way, part: int, parts: int) -> tuple[float, float, dict[str, float]]:
        """Return the simulated seconds of a step, the share in which the GPU computes, and what it waits for."""
        options = ["--gb", 4000, "--clock", self.gpus.kind, "--skip", SKIP]
        found = [
            self.run(way, part, number, SKIP + COUNTED, options)["clock"]["ranks"][0]
            for number in ([1, 2] if parts > 2 else [parts])
        ]
        one, last = found[0]["seconds"], found[-1]["seconds"]
        seconds = last + (parts - 2) * (last - one) if parts > 2 else last  # every further part costs the same
        return seconds, found[-1]["busy"], found[-1]["waits"]


def divisors(number: int) -> list[int]:
    """Return the numbers that divide this one, the largest first."""
    return [part for part in range(number, 0, -1) if number % part == 0]


def fitted(trials: Trials, way: Way, sequences: int) -> Way:
    """Return the way with its largest part of a GPU's sequences that fits, so that all parts are equal."""
    limit = trials.gpus.gib * GIB
    peaks = [trials.memory(way, part, 2) for part in (1, 2)] if sequences > 1 else [trials.memory(way, 1, 1)]
    (allocated, needed), (_, more) = peaks[0], peaks[-1]
    if needed > limit:
        return replace(way, needed=needed, allocated=allocated)
    slope = max(more - needed, 1.0)
    sizes = [part for part in divisors(sequences) if needed + (part - 1) * slope <= 1.02 * limit]
    for part in sizes:  # memory grows nearly, but not exactly, in proportion
        allocated, needed = trials.memory(way, part, sequences // part) if part > 1 else peaks[0]
        if needed <= limit:
            return replace(way, part=part, parts=sequences // part, needed=needed, allocated=allocated)
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


def tried(trials: Trials, sequences: int, out: bool = True) -> list[Way]:
    """Return the ways with their memory and, if they fit, seconds; recomputing is tried if without it parts are small.

    *Small* is less than 4,096 tokens at once: then the weights are gathered often, and kernels are short.
    """
    found: list[Way] = []
    for group in ways_of(trials.model, trials.gpus):
        large = [way for way in found if way.part * trials.model.sequence_length >= 4096 or way.part == sequences]
        if large:
            break
        for way in group:
            say(f"trying --shard {way.name} ...", out)
            known = fitted(trials, way, sequences)
            if known.part:
                seconds, busy, waits = trials.time(known, known.part, known.parts)
                known = replace(known, seconds=seconds, busy=busy, waits=waits)
            found.append(known)
    return found


def say(line: str, out: bool) -> None:
    """Print what is being done."""
    if out:
        print(line, file=sys.stderr, flush=True)


@cache
def error_of_clock() -> tuple[int, float, float]:
    """Return how many published trainings the clock was compared with, its error in the median and at most: factors."""
    for folder in sorted(results.RESULTS.iterdir()):
        if (folder / "clock_trust.json").exists():
            table = results.load(folder.name, "clock_trust")
            ratios = [row[table["columns"].index("ratio")] for row in table["rows"]]
            factors = [max(ratio, 1 / ratio) for ratio in ratios if isinstance(ratio, float)]
            return len(factors), median(factors), max(factors)
    raise UserError(f"{results.RESULTS} has no table clock_trust: run `git checkout results`")


@dataclass(frozen=True)
class Plan:
    """The answer."""

    model: Model
    gpus: Gpus
    recipe: Recipe
    sequences: int
    """of a GPU in a step"""
    tokens: float
    ways: list[Way]
    extra: list[str]

    @property
    def best(self) -> Way | None:
        """The fastest way that fits."""
        return min((way for way in self.ways if way.part), key=lambda way: way.seconds, default=None)

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.sequences * self.gpus.number

    @property
    def tokens_of_step(self) -> int:
        """Tokens of a step."""
        return self.batch * self.model.sequence_length

    @property
    def steps(self) -> int:
        """Steps of the training."""
        return max(1, round(self.tokens / self.tokens_of_step))

    def share_of_peak(self, seconds: float) -> float:
        """Return the model FLOPs utilization."""
        flops = self.model.size.flops_per_token(self.model.sequence_length) * self.tokens_of_step
        return flops / seconds / self.gpus.number / self.gpus.peak


def plan_of(arguments: argparse.Namespace, out: bool = True) -> Plan:
    """Return the plan that the flags ask for."""
    gpus = gpus_of(arguments)
    length = arguments.sequence_length
    model = (
        model_of(arguments.weights, length)
        if arguments.weights
        else Model(("--model", arguments.model), SIZES[arguments.model], length)
    )
    recipe = min(RECIPES, key=lambda row: abs(math.log(row.weights / model.weights)))
    wanted = (arguments.tokens_per_step or recipe.tokens_per_step) / length / gpus.number
    sequences = max(1, round(wanted) if wanted < 4 else 4 * round(wanted / 4))  # so that it has divisors
    extra = ["--chunked_loss", "true"] if arguments.chunked_loss == "true" else []
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(arguments.script, model, gpus, extra, Path(folder))
        ways = tried(trials, sequences, out)
    tokens = arguments.tokens or TOKENS_PER_WEIGHT * model.weights
    return Plan(model, gpus, recipe, sequences, tokens, ways, extra)


def duration(seconds: float) -> str:
    """Return a time in words that suit its size."""
    for unit, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.2g} seconds" if seconds < 10 else f"{seconds:.0f} seconds"


def line(title: str, text: str) -> None:
    """Print a paragraph of the answer with its title in the margin."""
    for number, row in enumerate(text.split("\n")):
        print(f"{'' if number else title:<12}{row}")


def show(plan: Plan, hours: float | None) -> None:
    """Print the answer."""
    model, gpus, length = plan.model, plan.gpus, plan.model.sequence_length
    size = model.size
    print(f"\n{model.weights / 1e9:.3g} billion weights, {plan.tokens / 1e9:,.4g} billion tokens, {gpus.name}\n")
    line(
        "model",
        f"{' '.join(model.flags)}: width {size.width:,}, depth {size.depth}, vocabulary {size.vocabulary:,}; "
        f"sequences of {length:,} tokens",
    )
    line(
        "batch",
        f"{plan.batch:,} sequences, {plan.tokens_of_step / 1e6:.2f} million tokens a step, {plan.sequences} sequences "
        f"on each GPU; {plan.steps:,} steps\n"
        f"published: {plan.recipe.source} ({plan.recipe.weights / 1e9:.3g} billion weights) has "
        f"{plan.recipe.tokens_per_step / 1e6:g} million tokens a step, a rate of {plan.recipe.lr:g}",
    )
    table(plan)
    best = plan.best
    if best is None:
        advise(plan)
        return
    line(
        "memory",
        f"{best.allocated / GIB:.1f} GiB at the peak, counted by PyTorch's allocator on a null GPU; with gaps, CUDA's "
        f"context and NCCL\n{best.needed / GIB:.1f} of {gpus.gib:g} GiB (rule: {GAPS - 1:.0%} more than reserved, and "
        f"{NOT_COUNTED / GIB:.0f} GiB), so {gpus.gib - best.needed / GIB:.1f} GiB are left",
    )
    known, usual, worst = error_of_clock()
    low, high = best.seconds / usual, best.seconds * usual
    shares = [plan.share_of_peak(best.seconds) * share for share in (1, 1 / usual, usual)]
    rules = [plan.share_of_peak(1.0) / share for share in reversed(USUAL_SHARE)]
    again = " (recomputing comes on top of it)" if best.recomputed else ""
    waits = [f"for {what} {share:.0%}" for what, share in best.waits.items() if share >= 0.01]
    line(
        "step",
        f"{best.seconds:.3g} s simulated, so {low:.3g} to {high:.3g} s: the clock's error is a factor of {usual:.2f} in "
        f"the median\n(at most {worst:.2f}) for {known} published trainings. "
        f"That is {shares[0]:.0%} of the peak ({shares[1]:.0%} to {shares[2]:.0%});\nthe GPU computes {best.busy:.0%} "
        f"of the time{', and waits ' + ', '.join(waits) if waits else ''}\n"
        f"rule: {rules[0]:.3g} to {rules[1]:.3g} s at {USUAL_SHARE[1]:.0%} to {USUAL_SHARE[0]:.0%} of the peak{again}",
    )
    total, speeds = best.seconds * plan.steps, [plan.tokens_of_step / seconds for seconds in (high, low)]
    costs = [seconds * plan.steps * gpus.number / 3600 for seconds in (low, high)]
    line(
        "cost",
        f"{duration(total)} ({duration(low * plan.steps)} to {duration(high * plan.steps)}) and "
        f"{costs[0]:,.0f} to {costs[1]:,.0f} GPU-hours, without failures and queues;\n"
        f"{speeds[0]:,.0f} to {speeds[1]:,.0f} tokens/s, {speeds[0] / gpus.number:,.0f} to "
        f"{speeds[1] / gpus.number:,.0f} for each GPU",
    )
    if hours:
        budget(plan, hours, high)
    size_of_checkpoint = BYTES_PER_PARAMETER * model.weights
    save = size_of_checkpoint / 1e9 / GB_PER_SECOND
    between = GPU_HOURS_PER_FAILURE * 3600 / gpus.number
    interval = max(1, round(best_interval(save, between) / best.seconds))
    line(
        "checkpoint",
        f"{size_of_checkpoint / 1e9:,.3g} GB ({BYTES_PER_PARAMETER} bytes a weight; three exist at a time), "
        f"{duration(save)} at {GB_PER_SECOND:g} GB/s (rule);\n"
        f"every {interval:,} steps costs least if a job fails every {GPU_HOURS_PER_FAILURE:,} GPU-hours (Llama 3's)",
    )
    line(
        "alarm",
        f"first loss far from ln({size.vocabulary:,}) = {math.log(size.vocabulary):.1f}; a step above {high:.3g} s after "
        f"the first ten;\npeak memory in the log above {best.allocated * GAPS / 1e9:.1f} GB; load above a tenth of "
        f"compute; grad norm that grows\nafter the warm-up; another tokens/s per GPU on {gpus.nodes} "
        f"node{'s' if gpus.nodes > 1 else ''} than on one by more than a tenth",
    )
    print()
    for row in job_lines(plan, best, interval):
        print(row)
    print(
        "\nNothing here was measured on your GPUs. Check it in the order of docs/64_gpus.md: one rank against two, one "
        "node, all nodes."
    )


def table(plan: Plan) -> None:
    """Print all ways that were tried."""
    limit = plan.gpus.gib
    print()
    print(f"{'--shard':<28}{'part':>6}{'parts':>7}{'GiB needed':>12}{'s a step':>10}{'of the peak':>13}")
    for way in plan.ways:
        if way.part:
            share = plan.share_of_peak(way.seconds)
            row = f"{way.part:>6}{way.parts:>7}{way.needed / GIB:>12.1f}{way.seconds:>10.3g}{share:>12.0%}"
            print(f"{way.name:<28}{row}{'  <- fastest' if way == plan.best else ''}")
        else:
            print(f"{way.name:<28}{'1':>6}{'':>7}{way.needed / GIB:>12.1f}  does not fit into {limit:g} GiB")
    if plan.gpus.number > 1 and not any(way.shard == "none" for way in plan.ways):
        print(f"{'none (DDP)':<28}{'':>13}{16 * plan.model.weights / GIB:>12.1f}  for weights, gradients, Adam alone")
    print()


def advise(plan: Plan) -> None:
    """Say what would make it fit."""
    gpus, model = plan.gpus, plan.model
    tried = [way for way in plan.ways if way.shard != "none"] or plan.ways
    stored = 16 * model.weights
    print("It does not fit. What would change that:")
    if tried:
        least = min(tried, key=lambda way: way.needed)
        ranks = 1 if least.shard == "none" else gpus.number // least.replicas
        rest = least.needed - stored / ranks
        room = gpus.gib * GIB - rest
        print(f"- as it is, a GPU needs {least.needed / GIB:.0f} GiB ({least.name}, one sequence at a time)")
        if room > 0:
            more = math.ceil(stored / room / gpus.per_node) * gpus.per_node
            print(f"- {more} GPUs of this kind: weights, gradients and Adam's state are shared by all (a rule; ask again)")
        else:
            print(f"- not more GPUs: {rest / GIB:.0f} GiB are activations and gathered weights, which are not shared")
    else:
        needed = math.ceil(stored / (0.6 * gpus.gib * GIB) / gpus.per_node) * gpus.per_node
        print(
            f"- weights, gradients and Adam's state are {stored / GIB:,.0f} GiB, on {gpus.number} GPU(s) "
            f"{stored / gpus.number / GIB:,.0f} GiB each: take about {needed} GPUs of this kind (a rule; ask again)"
        )
    if not plan.extra:
        print("- --chunked_loss true (torch 2.13 and newer): the logits never exist whole")
    print(f"- shorter sequences than {model.sequence_length:,}: activations grow in proportion to them")
    print("- a GPU with more memory, a smaller model, or a script with tensor parallelism (docs/64_gpus.md, chapter 1)")


def budget(plan: Plan, hours: float, seconds: float) -> None:
    """Say whether the training ends within the hours that there are."""
    needed = seconds * plan.steps / 3600
    if needed <= hours:
        line("hours", f"it ends within {hours:,g} hours also at the slow end, {needed:,.1f} hours")
        return
    tokens, gpus = hours / needed * plan.tokens, math.ceil(plan.gpus.number * needed / hours / plan.gpus.per_node)
    line(
        "hours",
        f"at the slow end it needs {needed:,.1f} hours, not {hours:,g}: train on {tokens / 1e9:,.3g} billion tokens, "
        f"or take {gpus} nodes\n(if the speed grows in proportion, and the batch may grow with it)",
    )


def job_lines(plan: Plan, best: Way, interval: int) -> list[str]:
    """Return the command to submit, with all flags of the training."""
    gpus, recipe = plan.gpus, plan.recipe
    epochs = max(1, round(plan.steps * best.seconds / 5400))  # of about an hour and a half
    per_epoch = max(1, round(plan.steps / epochs))
    steps = epochs * per_epoch
    warmup = min(recipe.warmup_steps, steps // 20)  # of a short training at most a twentieth
    several = gpus.number > 1
    head = f"sbatch --nodes={gpus.nodes} --ntasks-per-node={gpus.per_node} --gres=gpu:{gpus.per_node}"
    return [
        "# in the lesson's folder, or in one beside it; partition, account and time limit: slurm/site.sh, sinfo",
        "source ../slurm/site.sh",
        f"{head} --time=24:00:00 ../slurm/64_gpus.slurm \\" if several else "python train.py \\",
        f"    {' '.join(plan.model.flags)} --sequence_length {plan.model.sequence_length} --precision {gpus.sixteen} \\",
        f"    {' '.join([*best.flags(best.parts), *plan.extra])} --global_batch_size {plan.batch} \\",
        f"    --epochs {epochs} --limit_train {per_epoch * plan.batch} --limit_val {max(plan.batch, gpus.number)} \\",
        f"    --lr {recipe.lr:g} --min_lr 0.1 --warmup_steps {warmup} --weight_decay 0.1 --beta2 0.95 \\",
        f"    --save_interval {interval} --async_save true --timeout_minutes 30",
        f"# {epochs} x {per_epoch:,} steps = {steps * plan.tokens_of_step / 1e9:,.4g} billion tokens; an epoch is about "
        f"{duration(per_epoch * best.seconds)}, and ends with a validation",
    ]


def compare() -> None:
    """Store the plan's answers beside published speeds, and the parts that fit beside those that were used."""
    rows: list[list[results.Cell]] = []
    for one in PUBLISHED:
        size = one.size
        base = {64: "gpt_1b", 128: "gpt_7b"}[size.head_dimension]
        flags = ("--model", base, "--width", str(size.width), "--depth", str(size.depth))
        model = Model(flags, gpt_size(base, size.width, size.depth), 2048)
        options = argparse.Namespace(gpu=one.gpu, gb=one.gb, nodes=max(1, one.gpus // 8), gpus_per_node=8)
        gpus = gpus_of(options)
        say(f"{one.name} on {gpus.name} ...", True)
        with tempfile.TemporaryDirectory() as folder:
            trials = Trials(LESSON / "train.py", model, gpus, [], Path(folder))
            way = Way("blocks", recomputed=one.recomputed)
            needed = trials.memory(way, one.part, 1)[1] / GIB
            seconds, busy, _ = trials.time(way, one.part, 1)
        flops = model.size.flops_per_token(2048) * one.part * 2048
        share = flops / seconds / gpus.peak
        recomputed = ", recomputed" if one.recomputed else ""
        name = f"{one.name}, {one.gpus} {one.gpu.upper()} of {one.gb} GB, {one.part} x 2,048 tokens{recomputed}"
        rows.append([name, needed, one.share_of_peak, share, share / one.share_of_peak, busy])
    factors = [max(row[4], 1 / row[4]) for row in rows if isinstance(row[4], float)]
    results.store(
        "plan_published",
        title=f"Published speeds beside the plan's (wrong by a factor of {median(factors):.2f} in the median, "
        f"{max(factors):.2f} at most)",
        columns=["training", "GiB needed", "of the peak: published", "simulated", "ratio", "GPU busy"],
        rows=rows,
        formats={
            "GiB needed": ".1f",
            "of the peak: published": ".1%",
            "simulated": ".1%",
            "ratio": ".2f",
            "GPU busy": ".0%",
        },
        spread="published: MosaicML, llm-foundry, scripts/train/benchmarking/README.md",
    )


def main() -> None:
    """Plan, or compare plans with published figures."""
    parser = Parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=tuple(SIZES), default="gpt_1b", help="default: %(default)s")
    what.add_argument("--weights", type=float, help="number of weights, for a model of about this size")
    parser.add_argument("--tokens", type=float, help="to train on (default: 20 for each weight)")
    parser.add_argument("--tokens_per_step", type=float, help="default: that of the nearest published training")
    parser.add_argument("--sequence_length", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--gpu", default="h100", help="a100, h100, h200, l4, t4, or a file (nullgpu --clock); h100")
    parser.add_argument("--gb", type=float, help="memory of each, in GiB (default: the GPU's)")
    parser.add_argument("--nodes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--hours", type=float, help="that the training may take")
    parser.add_argument("--chunked_loss", choices=("true", "false"), default="false", help="of lesson 05's train.py")
    parser.add_argument("--script", type=Path, default=LESSON / "train.py", help="your copy of lesson 05's train.py")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--published", choices=("true", "false"), default="false", help="compare with published speeds")
    arguments = parser.parse_args()
    require_positive(
        arguments,
        *("weights", "tokens", "tokens_per_step", "sequence_length", "gb", "nodes", "gpus_per_node", "hours"),
    )
    if not arguments.script.is_file():
        raise UserError(f"--script {arguments.script}: there is no such file")
    if arguments.published == "true":
        compare()
        return
    plan = plan_of(arguments)
    show(plan, arguments.hours)
    if arguments.json:
        write_json(arguments.json, figures_of(plan))
    if plan.best is None:
        sys.exit(1)


def figures_of(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures for a program; times in seconds, memory in bytes."""
    best = plan.best
    return {
        "weights": plan.model.weights,
        "gpus": plan.gpus.number,
        "global_batch_size": plan.batch,
        "steps": plan.steps,
        "fits": best is not None,
        "ways": [
            {"name": way.name, "part": way.part, "parts": way.parts, "needed": way.needed, "seconds": way.seconds}
            for way in plan.ways
        ],
        "flags": best.flags(best.parts) if best else [],
        "seconds": best.seconds if best else None,
        "gpu_hours": best.seconds * plan.steps * plan.gpus.number / 3600 if best else None,
    }


if __name__ == "__main__":
    run_reporting_user_errors(main)

"""From a model, its tokens and your GPUs to flags, memory, seconds per step and GPU-hours. Nothing needs a GPU.

    python experiments/plan.py --model gpt_1b --gpu a100 --nodes 8                     # on 20 tokens for each weight
    python experiments/plan.py --weights 13e9 --gpu a100 --gb 40 --nodes 2 --tokens 100e9 --hours 240
    python experiments/plan.py --weights 300e6 --gpu l4 --gpus_per_node 1 --sequence_length 1024
    python experiments/plan.py --published true                      # ten speeds beside what others have measured
    python experiments/plan.py --cases true                          # the plans that docs/64_gpus.md compares

For each way of sharing the model over the GPUs, the lesson's train.py makes some steps on null GPUs (tools/nullgpu):
PyTorch's own allocator counts the bytes, and the simulated GPU the seconds. From these the plan chooses the fastest way
that fits, and the largest part of a batch. It takes one to three minutes. Every line of the answer says whether its
figure is counted, simulated, published or a rule. A plan is a beginning: measure it on one node before you believe it.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_cost import BYTES_PER_PARAMETER, GPU_HOURS_PER_FAILURE, best_interval
from lab import results
from lab.flags import Parser
from plan_published import compare
from plan_trials import (
    GAPS,
    GIB,
    HOST,
    LAUNCH,
    LESSON,
    NOT_COUNTED,
    Gpus,
    Model,
    Trials,
    Way,
    gpus_of,
    model_of,
    say,
    smallest,
    tried,
    vocabulary_flags,
)
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors
from workshop.jsonfile import write_json
from workshop.models.gpt import SIZES, gpt_size

TOKENS_PER_WEIGHT = 20
"""about what uses a number of operations best: Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, table A3"""
USUAL_SHARES = {"a100": (0.44, 0.64), "h100": (0.33, 0.46), "h200": (0.33, 0.46)}
"""of the peak that trainings of language models reached: the lowest and the highest of MosaicML's in plan_published.py,
and torchtitan's 33 % of Llama 3.1 8B on H100 (benchmarks/llama3_h100_202412_torchtitan.md). An H200 computes as an
H100. What is recomputed does not count"""
ALIKE = 0.02
"""share of the seconds by which ways may differ without being faster or slower: a simulation is no better than that"""
THE_HOST, HOST_DECIDES = "the host", 0.1
"""what a GPU can wait for, as the clock's report calls it, and the share of the step from which the plan says so"""
MOST_PASSES = 4
"""over the same text, which are nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)"""
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
    data_tokens: float | None = None
    """of the user's file; None: as many as an epoch"""
    smallest: tuple[int, Way] | None = None
    """the smallest number of GPUs of a node on which a step of the best way fits, and its parts there"""

    @property
    def best(self) -> Way | None:
        """The fastest way that fits; of those that differ by less than ALIKE, the plainest, which is tried first."""
        fitting = [way for way in self.ways if way.part]
        limit = (1 + ALIKE) * min((way.seconds for way in fitting), default=0.0)
        return next((way for way in fitting if way.seconds <= limit), None)

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


def plan_of(arguments: argparse.Namespace, fewer: bool = True) -> Plan:
    """Return the plan that the flags ask for; ``fewer``: with the smallest number of GPUs that a step fits on."""
    gpus = gpus_of(arguments)
    length = arguments.sequence_length
    if arguments.weights:
        model = model_of(arguments.weights, length, arguments.vocabulary)
    else:
        flags = "--model", arguments.model, *vocabulary_flags(arguments.vocabulary)
        model = Model(flags, gpt_size(arguments.model, vocabulary=arguments.vocabulary), length)
    recipe = min(RECIPES, key=lambda row: abs(math.log(row.weights / model.weights)))
    wanted = (arguments.tokens_per_step or recipe.tokens_per_step) / length / gpus.number
    sequences = max(1, round(wanted) if wanted < 4 else 4 * round(wanted / 4))  # so that it has divisors
    extra = ["--chunked_loss", "true"] if arguments.chunked_loss == "true" else []
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(arguments.script, model, gpus, extra, Path(folder))
        ways = tried(trials, sequences)
        tokens = arguments.tokens or TOKENS_PER_WEIGHT * model.weights
        plan = Plan(model, gpus, recipe, sequences, tokens, ways, extra, arguments.data_tokens)
        return replace(plan, smallest=smallest(trials, plan.best, sequences)) if fewer and plan.best else plan


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
        f"published: {plan.recipe.source} ({plan.recipe.weights / 1e9:.3g} billion weights) has\n"
        f"{plan.recipe.tokens_per_step / 1e6:g} million tokens a step, a rate of {plan.recipe.lr:g}",
    )
    if gpus.nodes > 1:
        line(
            "network",
            f"a bus bandwidth of {gpus.between / 1e9:.4g} GB/s between nodes and {gpus.within / 1e9:.4g} within one, "
            "as nccl-tests print it\n(--network sets the first; otherwise both are assumed)",
        )
    table(plan)
    best = plan.best
    if best is None:
        advise(plan)
        return
    line(
        "memory",
        f"{best.allocated / GIB:.1f} GiB at the peak and {best.reserved / GIB:.1f} reserved, counted by PyTorch's "
        f"allocator on a null GPU; a GPU needs\n{best.needed / GIB:.1f} of {gpus.gib:g} GiB (rule: {GAPS - 1:.0%} more "
        f"than reserved, and {NOT_COUNTED / GIB:.0f} GiB), so {gpus.gib - best.needed / GIB:.1f} GiB are left",
    )
    known, usual, worst = error_of_clock()
    low, high = best.seconds / usual, best.seconds * usual
    waits = [f"for {what} {share:.0%}" for what, share in best.waits.items() if share >= 0.01]
    waiting = f", and waits {', '.join(waits)}" if waits else ""
    line(
        "step",
        f"{best.seconds:.3g} s simulated, {plan.share_of_peak(best.seconds):.0%} of the peak, so likely {low:.3g} to "
        f"{high:.3g} s, at worst {worst * best.seconds:.3g} s:\nhalf of {known} published trainings were within a "
        f"factor of {usual:.2f}, all within {worst:.2f} (the clock's page).\n"
        f"The GPU computes {best.busy:.0%} of the time{waiting}",
    )
    if shares := USUAL_SHARES.get(gpus.short):
        fast, slow = (plan.share_of_peak(1.0) / share for share in reversed(shares))
        line("", f"others reached {shares[0]:.0%} to {shares[1]:.0%} of the peak: {fast:.3g} to {slow:.3g} s (rule)")
        low, high = min(low, fast), max(high, slow)
    late = ": TOO LONG; take larger parts, or --compile default" if best.host_seconds > 0.7 * best.seconds else ""
    line(
        "",
        f"the host launches {best.launches:,.0f} kernels, in about {best.host_seconds:.2g} s at {1e6 * LAUNCH:.0f} µs "
        f"each (rule){late}",
    )
    if slowed := slowed_by_host(plan):
        line("", slowed)
    near = [way.name for way in plan.ways if way.part and way is not best and way.seconds < usual * best.seconds]
    if near:
        line(
            "",
            f"not surely slower: --shard {'; --shard '.join(near)};\nbegin with the fastest, and try them on one node",
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
        budget(plan, hours, max(high, worst * best.seconds))
    size_of_checkpoint = BYTES_PER_PARAMETER * model.weights
    save = size_of_checkpoint / 1e9 / GB_PER_SECOND
    between = GPU_HOURS_PER_FAILURE * 3600 / gpus.number
    interval = best_interval(save, between)
    line(
        "checkpoint",
        f"{size_of_checkpoint / 1e9:,.3g} GB ({BYTES_PER_PARAMETER} bytes a weight; three exist at a time), "
        f"{duration(save)} at {GB_PER_SECOND:g} GB/s (rule);\none in {duration(interval)} costs least if a job fails "
        f"every {GPU_HOURS_PER_FAILURE:,} GPU-hours (Llama 3's);\neach epoch ends with one",
    )
    than_one = f"; another tokens/s per GPU on {gpus.nodes} nodes than on one by more than a tenth"
    line(
        "alarm",
        f"first loss far from ln({size.vocabulary:,}) = {math.log(size.vocabulary):.1f}; a step above {high:.3g} s "
        f"after the first ten;\npeak memory in the log above {best.allocated * GAPS / 1e9:.1f} GB; load above a tenth "
        "of compute; grad norm that grows\nafter the warm-up" + (than_one if gpus.nodes > 1 else ""),
    )
    if plan.smallest:
        line("sizes", sizes(plan, *plan.smallest))
    print()
    for row in job_lines(plan, best, interval, high):
        print(row)
    print(
        "\nNothing here was measured on your GPUs. Check it in the order of docs/64_gpus.md: one rank against two,\n"
        "one node, all nodes."
    )


def slowed_by_host(plan: Plan) -> str:
    """Say for which ways the time depends on the machine of the plan; nothing, if the GPU decides in all of them."""
    waiting = {way.name: way.waits.get(THE_HOST, 0.0) for way in plan.ways if way.part}
    names = [name for name, share in waiting.items() if share >= HOST_DECIDES]
    if not names:
        return ""
    return (
        f"with --shard {'; --shard '.join(names)}\nthe GPU waits for the host {max(waiting.values()):.0%} of the time, "
        f"and the host is this machine, counted {HOST} times as fast:\nif it is busy, plan again when it is idle: "
        "another way may then be the fastest"
    )


def sizes(plan: Plan, number: int, way: Way) -> str:
    """Say with which flags fewer GPUs, at least ``number``, are measured beside all of them: the same batch on each."""
    gpus = plan.gpus
    numbers = sorted({1, 2, gpus.per_node, 2 * gpus.per_node, gpus.number})
    equal = [f"{one}" for one in numbers if number <= one <= gpus.number]
    flags = " ".join(way.flags(way.parts)[2:])  # without --shard
    fewer = "" if number == 1 else "; on fewer, a model of less --depth"
    one_node = (
        "; leave out --replicas on one node, on several it is\ntheir number"
        if plan.best and plan.best.replicas > 1
        else ""
    )
    needs = "one GPU then needs" if number == 1 else f"each of {number} GPUs then needs"
    return (
        f"to measure {', '.join(equal)} GPUs alike (docs/first_hour.md): in place of --global_batch_size and\n"
        f"--accumulate take {f'--batch_size {plan.sequences} {flags}'.rstrip()};\n"
        f"{needs} {way.needed / GIB:.1f} GiB{fewer}{one_node}"
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
    if plan.gpus.number > 1 and any(way.shard == "none" and way.part for way in plan.ways):
        copy = GAPS * 4 * plan.model.weights / GIB
        print(
            f"(DDP needs {copy:.1f} GiB more or less, by when its first buckets are freed: plan with the larger value)"
        )
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
            print(
                f"- {more} GPUs of this kind: weights, gradients and Adam's state are shared by all (a rule; ask again)"
            )
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
        line("hours", f"it ends within {hours:,g} hours also at worst, in {needed:,.1f} hours")
        return
    tokens, gpus = hours / needed * plan.tokens, math.ceil(plan.gpus.number * needed / hours / plan.gpus.per_node)
    line(
        "hours",
        f"at worst it needs {needed:,.1f} hours, not {hours:,g}: train on {tokens / 1e9:,.3g} billion tokens, "
        f"or take {gpus} nodes\n(if the speed grows in proportion, and the batch may grow with it)",
    )


def job_lines(plan: Plan, best: Way, interval: float, slowest: float) -> list[str]:
    """Return the command to submit, with all flags of the training.

    Args:
        interval: seconds between two checkpoints.
        slowest: seconds that a step may take.
    """
    model, gpus, recipe = plan.model, plan.gpus, plan.recipe
    epochs = max(1, round(plan.steps * best.seconds / 5400))  # of about an hour and a half
    if plan.data_tokens:
        most = int(plan.data_tokens / plan.tokens_of_step)
        if most < 1:
            raise UserError(f"--data_tokens {plan.data_tokens:g} is less than a step, {plan.tokens_of_step:,} tokens")
        epochs = max(epochs, math.ceil(plan.steps / most))
    per_epoch = max(1, round(plan.steps / epochs)) if not plan.data_tokens else max(1, plan.steps // epochs)
    steps = epochs * per_epoch
    validation = max(plan.batch, gpus.number)
    passes = steps * plan.tokens_of_step / plan.data_tokens if plan.data_tokens else 0.0
    many = " (more than four gain less and less: docs/64_gpus.md, chapter 3)" if passes > MOST_PASSES else ""
    warmup = min(recipe.warmup_steps, steps // 20)  # of a short training at most a twentieth
    several = gpus.number > 1
    # Steps are counted in an epoch, so a longer interval would never end.
    often = max(1, round(interval / best.seconds))
    saves = f"--save_interval {often} " if often < per_epoch else ""
    limit = min(24, math.ceil(1.2 * steps * slowest / 3600) + 1)
    own = ["# own tokens: add your --data_dir and --dataset"] if "--vocabulary" in model.flags else []
    head = f"sbatch --nodes={gpus.nodes} --ntasks-per-node={gpus.per_node} --gres=gpu:{gpus.per_node}"
    return [
        "# in the lesson's folder, or in one beside it; partition, account and time limit: slurm/site.sh, sinfo",
        *(["# --cpus-per-task is 12 in the file: CPUs of your node divided by its GPUs"] if several else []),
        *own,
        "source ../slurm/site.sh",
        f"{head} --time={limit:02}:00:00 ../slurm/64_gpus.slurm \\" if several else "python train.py \\",
        f"    {' '.join(model.flags)} --sequence_length {model.sequence_length} --precision {gpus.sixteen} \\",
        f"    {' '.join([*best.flags(best.parts), *plan.extra])} --global_batch_size {plan.batch} \\",
        f"    --epochs {epochs} --limit_train {per_epoch * plan.batch} --limit_val {validation} \\",
        f"    --lr {recipe.lr:g} --min_lr 0.1 --warmup_steps {warmup} --weight_decay 0.1 --beta2 0.95 \\",
        f"    {saves}--async_save true --timeout_minutes 30{'' if several else ' --resume true'}",
        f"# {epochs} x {per_epoch:,} steps = {steps * plan.tokens_of_step / 1e9:,.4g} billion tokens; an epoch is "
        f"about {duration(per_epoch * best.seconds)}, and ends with a validation.",
        f"# The data must hold one epoch, {per_epoch * plan.tokens_of_step / 1e9:,.4g} billion tokens, and "
        f"{validation * model.sequence_length / 1e6:,.4g} million for validation;",
        "# each epoch goes on where the one before ended"
        + (f", {passes:.2g} passes over your tokens in all{many}." if passes > 1 else "."),
    ]


CASES = (
    ("`gpt_1b`", "--model gpt_1b --nodes 8 --gpu a100"),
    ("`gpt_1b`", "--model gpt_1b --nodes 8 --gpu h100"),
    ("`gpt_7b`", "--model gpt_7b --nodes 8 --gpu a100"),
    ("`gpt_7b`", "--model gpt_7b --nodes 8 --gpu h100"),
    ("13 billion weights", "--weights 13e9 --nodes 2 --gpu a100 --gb 40"),
    ("300 million weights", "--weights 300e6 --sequence_length 1024 --gpus_per_node 1 --gpu l4"),
    ("30 billion weights", "--weights 30e9 --sequence_length 4096 --nodes 1 --gpu a100 --gb 40"),
)
"""the plans that are compared in docs/64_gpus.md"""


def compare_cases() -> None:
    """Store the plans of `CASES`."""
    rows: list[list[results.Cell]] = results.unfinished_rows("plans")
    for name, flags in CASES[len(rows) :]:
        say(f"{name}: {flags}")
        plan = plan_of(arguments_of(flags.split()), fewer=False)
        best = plan.best
        title = f"{name} on {plan.gpus.name}"
        if best is None:
            rows.append([title, "does not fit", *5 * [None]])
            store_cases(rows)
            continue
        hours = best.seconds * plan.steps * plan.gpus.number / 3600
        divided = f"`--shard {best.shard}`{', recomputed' if best.recomputed else ''}"
        groups = f" `--replicas {best.replicas}`" if best.replicas > 1 else ""
        parts = f"{best.parts} of {best.part} x {plan.model.sequence_length:,}"
        share = plan.share_of_peak(best.seconds)
        rows.append([title, f"{divided}{groups}", parts, best.needed / GIB, best.seconds, share, hours])
        store_cases(rows)


def store_cases(rows: list[list[results.Cell]]) -> None:
    """Store the table; after each row, because all of them take half an hour."""
    known, usual, worst = error_of_clock()
    columns = ["model and GPUs", "way", "parts of a GPU's batch", "GiB needed", "s a step", "of the peak", "GPU-hours"]
    results.store(
        "plans",
        title=f"The fastest way that fits, on {TOKENS_PER_WEIGHT} tokens for each weight",
        columns=columns,
        rows=rows,
        formats={"GiB needed": ".1f", "s a step": ".3g", "of the peak": ".0%", "GPU-hours": ",.0f"},
        spread=f"memory counted on null GPUs, seconds simulated: for {known} published trainings the clock is wrong by "
        f"a factor of {usual:.2f} in the median, {worst:.2f} at most",
        finished=len(rows) == len(CASES),
    )


def parser_of_plans() -> Parser:
    """Return the parser of this command."""
    parser = Parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=tuple(SIZES), default="gpt_1b", help="default: %(default)s")
    what.add_argument("--weights", type=float, help="number of weights, for a model of about this size")
    parser.add_argument("--tokens", type=float, help="to train on (default: 20 for each weight)")
    parser.add_argument("--data_tokens", type=float, help="tokens of your file, if it has fewer than --tokens")
    parser.add_argument("--tokens_per_step", type=float, help="default: that of the nearest published training")
    parser.add_argument("--vocabulary", type=int, help="of your tokenizer, a multiple of 128 (default: the model's)")
    parser.add_argument("--sequence_length", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--gpu", default="h100", help="a100, h100, h200, l4, t4, or a file (nullgpu --clock); h100")
    parser.add_argument("--gb", type=float, help="memory of each, in GiB (default: the GPU's)")
    parser.add_argument("--nodes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--network", type=float, metavar="GB/s", help="bus bandwidth between nodes (default: assumed)")
    parser.add_argument("--hours", type=float, help="that the training may take")
    parser.add_argument("--chunked_loss", choices=("true", "false"), default="false", help="of lesson 05's train.py")
    parser.add_argument(
        "--script",
        type=Path,
        help="your copy of lesson 05's train.py (default: that; with --vocabulary, of own_tokens)",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--published", choices=("true", "false"), default="false", help="compare with published speeds")
    parser.add_argument("--cases", choices=("true", "false"), default="false", help="compare the plans of some cases")
    return parser


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a plan.

    Raises:
        UserError: a figure is not positive, or the script does not exist.
    """
    arguments = parser_of_plans().parse_args(words)
    require_positive(
        arguments,
        *("weights", "tokens", "tokens_per_step", "vocabulary", "sequence_length", "gb", "nodes", "gpus_per_node"),
        *("hours", "network"),
    )
    if arguments.script is None:  # lesson 05's own script reads bytes
        arguments.script = LESSON / ("own_tokens/train.py" if arguments.vocabulary else "train.py")
    if not arguments.script.is_file():
        raise UserError(f"--script {arguments.script}: there is no such file")
    return arguments


def main() -> None:
    """Plan, or compare plans with published figures."""
    arguments = arguments_of()
    if "true" in (arguments.published, arguments.cases):
        compare() if arguments.published == "true" else compare_cases()
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
            {
                "name": way.name,
                "part": way.part,
                "parts": way.parts,
                "needed": way.needed,
                "seconds": way.seconds,
                "waits": way.waits,
            }
            for way in plan.ways
        ],
        "flags": best.flags(best.parts) if best else [],
        "seconds": best.seconds if best else None,
        "gpu_hours": best.seconds * plan.steps * plan.gpus.number / 3600 if best else None,
    }


if __name__ == "__main__":
    run_reporting_user_errors(main)

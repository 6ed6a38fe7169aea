"""The words of plan.py's answer, and the job's command.

Used by plan.py. Every line says whether its figure is counted, simulated, published or a rule.
"""

import math

from checkpoint_cost import BYTES_PER_PARAMETER, GPU_HOURS_PER_FAILURE, best_interval
from plan_answer import Plan, error_of_clock
from plan_trials import GAPS, GIB, HOST, LAUNCH, NOT_COUNTED, Way
from workshop.errors import UserError

USUAL_SHARES = {"a100": (0.44, 0.64), "h100": (0.33, 0.46), "h200": (0.33, 0.46)}
"""of the peak that trainings of language models reached: the lowest and the highest of MosaicML's in plan_published.py,
and torchtitan's 33 % of Llama 3.1 8B on H100 (benchmarks/llama3_h100_202412_torchtitan.md). An H200 computes as an
H100. What is recomputed does not count"""
THE_HOST, HOST_DECIDES = "the host", 0.1
"""what a GPU can wait for, as the clock's report calls it, and the share of the step from which the plan says so"""
MOST_PASSES = 4
"""over the same text, which are nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)"""
GB_PER_SECOND = 1.0
"""that all ranks together write, on a file system that is not fast"""


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

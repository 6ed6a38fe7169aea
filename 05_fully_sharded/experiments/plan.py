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
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import results
from lab.flags import Parser
from plan_answer import RECIPES, Plan, error_of_clock
from plan_published import compare
from plan_text import show
from plan_trials import GIB, LESSON, Model, Trials, gpus_of, model_of, say, smallest, tried, vocabulary_flags
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors
from workshop.jsonfile import write_json
from workshop.models.gpt import SIZES, gpt_size

TOKENS_PER_WEIGHT = 20
"""about what uses a number of operations best: Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, table A3"""


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

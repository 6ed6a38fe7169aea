"""Show the scripts of the pages "In your own script": whole ones, and what one step changes; cog calls this."""

from lab import render
from workshop.paths import REPOSITORY

STEPS = {
    "01_single_gpu": ("plain", "step1_measure", "step2_bottleneck", "step3_loader", "step4_nvtx"),
    "03_ddp": ("plain", "step1_ddp", "step2_accumulate", "step3_resume"),
    "04_mixed_precision": ("plain", "step1_bf16", "step2_fp16", "step3_fast"),
    "05_fully_sharded": ("ddp", "step1_shard", "step2_memory", "step3_checkpoint"),
}
"""for each lesson, its scripts; each one is the one before with one more change"""


def former(lesson: str, step: str) -> str:
    """Return the script that a step changes."""
    return STEPS[lesson][STEPS[lesson].index(step) - 1]


def script(lesson: str, name: str) -> str:
    """Return a whole file."""
    return f"```python\n{(REPOSITORY / lesson / 'own_script' / f'{name}.py').read_text()}```"


def text(lesson: str, name: str) -> str:
    """Return a whole job file; not as "bash", because the tests run the commands in those blocks."""
    return f"```sh\n{(REPOSITORY / lesson / 'own_script' / name).read_text()}```"


def changed(lesson: str, step: str) -> dict[str, list[str]]:
    """Return what a step changes: the hunks of each definition, by its name."""
    before, after = (
        render.definitions_in(REPOSITORY / lesson / "own_script" / f"{name}.py")
        for name in (former(lesson, step), step)
    )
    return render.differences(before, after, {})


def change(lesson: str, step: str, *names: str) -> str:
    """Return the hunks of some definitions that a step changes; "main: text" means those of main with this text."""
    chosen = []
    for name, _, text in (name.partition(": ") for name in names):
        found = [hunk for hunk in changed(lesson, step).get(name, []) if text in hunk]
        if not found:
            raise ValueError(f"{lesson}: nothing that {step} changes in {name} contains {text!r}")
        chosen += found
    return "\n\n".join(chosen)


def count(lesson: str, step: str) -> tuple[int, int]:
    """Return how many lines a step adds or changes, and how many it removes or changes; empty ones do not count."""
    lines = [line for hunks in changed(lesson, step).values() for hunk in hunks for line in marked(hunk)]
    return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)


def marked(hunk: str) -> list[str]:
    """Return the lines of a hunk that are new (+) or gone (-); all lines of a new definition are new."""
    first, *lines, _ = hunk.splitlines()
    if first == "```python":
        lines = [f"+{line}" for line in lines]
    return [line for line in lines if line[:1] in ("+", "-") and line[1:].strip()]

"""The vocabulary: code, comments, messages and names use the field's terms, not private ones.

A pattern finds the private use of a word as far as possible, and not its ordinary one. Two uses are left to the reader,
because no pattern separates them from ordinary ones: "device" for the memory of a GPU, and "copy" for the identity
baseline.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY


def word(pattern: str) -> str:
    """A whole word, where an underscore or a capital letter after it ends a word too."""
    return rf"(?<![.A-Za-z])(?:{pattern})(?![a-z])"


WORDS = {  # pattern: what to write instead, an example that must be found, one that must not
    word("mend(s|ed|ing)?"): ("fix, fixed", "how to mend it", "recommended amendments"),
    word("told|tells?|telling"): ("reported, shows, says, is passed, prints", "are_told_in_one_line", "untold intell"),
    word("meet(s|ing)?|met(?= at| each)"): ("rendezvous, join", "meet(rank)", "the metric"),
    r"\b(ranks?|processes) (come|came|comes)\b": ("joined", "before all ranks come", "the ranks compute"),
    word("patien(t|ce)"): ("timeout", "PATIENCE = 5", "inpatient"),
    r"(?i)\b(the|of) dead\b|\bdead (ranks?|process\w*)\b|_the_dead\b": (
        *("failed rank", "find_the_dead"),
        "deadline, a dead lock",
    ),
    r"(?i)\b(falls?|fell|fallen|goes|went) silent\b|(?-i:\bSILENCE)": (
        *("does not answer; TIMEOUT", "SILENCE = 60"),
        "a silent error",
    ),
    r"(?i)\b(ranks? (part|leave)s?(?! out)|(part|leave) (from )?(them|the (other )?ranks|the group))\b": (
        *("destroy the process group, exit", "train with them, and leave them at the end"),
        "the rank leaves out",
    ),
    word("houses?|ground.floor"): ("architecture, package, lowest layer", "GROUND_FLOOR_FIRST", "warehouse"),
    word("rungs?"): ("loader", "each rung", "wrung"),
    word("climb(s|ed|ing)?"): ("compare step by step", "climb the ladder", "climate"),
    r"(?i)(?<!memory\.)_records?(?![a-z])|\brecords?_(?!(function|shapes|stream)\b)[a-z]|(?-i:\bRecords?\b(?! ))": (
        *("log, save; results file", "put_record(file)"),
        "with record_function('forward'): ",
    ),
    r"(?i)\bon record\b|\b(a|an|the|each|its|no|their|whose|old|new) records?\b": (
        *("results file", "the record of a run"),
        "the profiler records it",
    ),
    word("verdicts?"): ("diagnosis", '"verdict": found', "diagnosis"),
    word("story|stories"): ("exercise page", "the story of the exercise", "history"),
    r"(?i)\b(drawn|draws?|drawing)_?( the| a| new)? ?(digits?|data|boxes|box|stand)\b|\bdrawn by the computer": (
        *("synthetic, generated", "draw_digits(20)"),
        "draw a line, drawn at random",
    ),
    word("bring(s|ing)?|brought"): ("download, generate, prepare", "bring_drawn", "bringer"),
    word("pictures?"): ("images (data); figure, plot", "Pictures", "depicture"),
    r"\bbounds (the|a|an|it|this|them|your|what|how)\b|\bbounded\b": (
        *("limits", "what bounds a run"),
        "Data-bound: upper bound",
    ),
    word("ceilings?"): ("upper bound", "the ceiling of it", "math.ceil(x)"),
    r"(?i)\bthe rate\b(?! of)": ("learning rate; throughput", "then the rate falls", "the learning rate"),
    r"(?i)\bas (it|they) comes?\b": ("default settings", "PyTorch as it comes", "as it computes"),
    r"(?i)\b(nothing|all|everything|half|is|are|was|be|of it) hidden\b|\bhidden_(share|ms|milli|seconds)|[\"']hidden": (
        *("overlapped; no overlap", "all hidden but the last"),
        "the hidden layer",
    ),
    r"[\"'|] ?waiting( /| %| \(\w+\))? ?[\"'|]": ("time waiting for other ranks", '"waiting"', '"waiting for data"'),
    word("cards?"): ("network adapters; rank info", "network cards", "discarded, cardinal"),
    r"(?i)\bby heart\b": ("overfitting", "learning by heart", "heartbeat"),
    word("imitat(es?|ed|ing|ions?)"): ("emulates", "only_imitates", "limitation"),
    word("pretend(s|ed|ing)?|PRETENDED"): ("fake GPUs", "WORKSHOP_PRETENDED_GPUS", "fake"),
    r"(?i)\b(leaves?|left|leaving) out units\b": ("drops activations", "leaves out units", "leaves out the rest"),
    r"(?i)\bdisks? that turns?\b": ("hard disk", "a disk that turns", "a disk returns"),
    r"(?i)unequal.shares": ("average of averages", "mean_of_unequal_shares", "unequal"),
    r"(?i)\bon (the|its|their) way\b|\b(take|takes|taken|took|taking) along\b|\b(go|goes) with\b": (
        *("say what is done: copy, pass, delete", "a tensor on the way"),
        "away, along",
    ),
    r"(?i)\bworkers? of (a|the|each) GPU\b|\bGPU's workers\b": ("CUDA core", "workers of a GPU", "DataLoader workers"),
    r"(?i)\butilis": ("utilization", "utilisation", "utilization"),
}
ENDINGS = (".py", ".sh", ".slurm", ".yaml")


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the content of every file of code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *(f"*{ending}" for ending in ENDINGS)]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in set(listed) - {f"tests/{Path(__file__).name}"}:
        if (REPOSITORY / name).is_file():
            yield name, (REPOSITORY / name).read_text(encoding="utf-8")


def flagged(pattern: str) -> str:
    """A pattern for a whole word is for any case."""
    return f"(?i:{pattern})" if pattern.startswith("(?<![") else pattern


def test_the_vocabulary_of_the_field_is_used() -> None:
    hits = [
        f"{name}:{text.count(chr(10), 0, found.start()) + 1}: '{found[0]}' ({replacement})"
        for name, text in texts()
        for pattern, (replacement, _, _) in WORDS.items()
        for found in re.finditer(flagged(pattern), f"{text}\n{Path(name).name}")
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("pattern", WORDS)
def test_a_pattern_finds_the_private_use_and_no_other(pattern: str) -> None:
    _, found, other = WORDS[pattern]
    assert re.search(flagged(pattern), found)
    assert not re.search(flagged(pattern), other)

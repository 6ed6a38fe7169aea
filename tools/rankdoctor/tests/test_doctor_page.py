"""The pages: all checks, modules and flags are on them, and the report and the counts are the true ones."""

import json
import re
import subprocess
import sys
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import wild
from doctor_events import correct_run
from rankdoctor import cli, exercises, report
from rankdoctor.checks import CHECKS, Diagnosis, Finding
from rankdoctor.checks.comparisons import COMPARISONS

PROJECT = Path(__file__).resolve().parent.parent
PAGE = (PROJECT / "README.md").read_text()
EVIDENCE = (PROJECT / "docs/trust.md").read_text()
CORPUS = PROJECT / "corpus"


@pytest.mark.parametrize("check", [*CHECKS, *COMPARISONS.values()], ids=lambda check: check.name)
def test_each_check_is_on_the_page_with_its_reason_and_its_exercise(check) -> None:  # noqa: ANN001
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {check.title} |")]
    reason = check.find.__doc__.splitlines()[0]
    exercise = f"`{check.exercise}`" if check.exercise else ""
    assert row == f"| {check.title} | {reason} | {exercise} | `{check.name}` |"


def test_the_map_names_all_modules_and_no_others() -> None:
    (table,) = re.findall(r"^\| file \| content \|\n(.*?)\n\n", PAGE, re.M | re.S)
    package = PROJECT / "src/rankdoctor"
    modules = {str(file.relative_to(package)) for file in package.rglob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"^\| `(.*?)` \|", table, re.M)) == modules


def test_the_flags_on_the_page_exist() -> None:
    flags = set(re.findall(r"`(?:rankdoctor )?(--[\w-]+)", PAGE))
    assert len(flags) > 20
    assert flags <= {*cli.parser()._option_string_actions}


def findings(report: str) -> list[str]:
    """Return kind, line and text of each finding; numbers in texts follow from random numbers, and become N."""
    found = re.findall(r"^(FAULT|NOTE|COST) +(\S+)\n +(.*)\n", report, re.M)
    return [f"{kind} {at} {re.sub(r'[0-9]+', 'N', text)}" for kind, at, text in found]


def in_one_line(report: str) -> str:
    """Return a report without line breaks, seconds and consequences, which depend on random numbers."""
    words = re.sub(r"\d+ s,", "N s,", " ".join(report.split()))
    return re.sub(r" What follows from it: .*?(?= FAULT |$)", "", words)


@pytest.mark.slow
def test_the_example_gives_the_report_on_the_page() -> None:
    command = [sys.executable, "-m", "rankdoctor", "docs/example.py"]
    seen = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert seen.returncode == 1, seen.stderr
    assert findings(seen.stdout) == findings(PAGE)
    (shown,) = re.findall(r"```text\n(rankdoctor: .*?)\n```", PAGE, re.S)
    assert in_one_line(shown) == in_one_line(seen.stdout.partition("\nSeen done right")[0])


@pytest.mark.parametrize("url", ["", "https://example.org/exercises/"])
def test_a_finding_names_its_exercise_and_links_to_it_where_the_address_is_known(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Message()
    known["Project-URL"] = "Source, https://example.org/source"
    if url:
        known["Project-URL"] = f"Exercises, {url}"
    monkeypatch.setattr(exercises, "metadata", lambda name: known)
    exercises.address.cache_clear()
    finding = Finding("FAULT", "train.py:1", "all ranks train on the same samples", "share them", exercise="same_half")
    finding.consequences = [Finding("FAULT", "train.py:2", "an epoch is too long", "share them")]
    link = "https://example.org/exercises/same_half.html" if url else ""
    said = "       Exercise: same_half (multi-GPU training workshop)" + (f": {link}" if url else "")
    assert said in list(report.lines_of(finding))
    diagnosis = Diagnosis()
    diagnosis.findings = [finding]
    (found,) = json.loads(report.as_json([correct_run()], diagnosis, 1))["findings"]
    assert (found["exercise"], found["exercise_url"]) == ("same_half", link)
    assert found["consequences"][0]["exercise_url"] == ""
    exercises.address.cache_clear()


def test_a_source_that_is_not_installed_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Message:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(exercises, "metadata", missing)
    exercises.address.cache_clear()
    assert exercises.link_to("same_half") == ""
    exercises.address.cache_clear()


def in_table(scripts: list[dict]) -> str:
    """Return how many faults were found in these scripts, and how many FAULTs are wrong, as the page's table has it."""
    faults = [fault for script in scripts for fault in script["faults"]]
    findings = [finding for script in scripts for finding in script["findings"] if finding["kind"] == "FAULT"]
    wrong = sum(finding["judgement"].startswith("false") for finding in findings)
    return f"| {sum(fault['found'] for fault in faults)} of {len(faults)} | {wrong} |"


def test_the_counts_are_those_of_the_stored_runs() -> None:
    results = json.loads((CORPUS / "corpus_results.json").read_text())
    for_improvement = [one for one in results if not one["held_out"]]
    rounds = {
        number: [one for one in results if one["held_out"] and one.get("round", 1) == number] for number in (1, 2)
    }
    last = {number: list({one["name"]: one for one in found}.values()) for number, found in rounds.items()}
    first = [one for one in rounds[2] if "rerun" not in one]
    assert [len(found) for found in (for_improvement, last[1], first, last[2])] == [64, 12, 12, 12]
    assert f"| 64, with which it was improved {in_table(for_improvement)}" in EVIDENCE
    assert f"| 12 that had not been opened, with launcher and data given {in_table(last[1])}" in EVIDENCE
    assert f"| 12 more that had not been opened {in_table(first)}" in EVIDENCE
    assert f"| the same, after what was missed had been fixed {in_table(last[2])}" in EVIDENCE


def test_the_counts_of_both_editions_are_those_of_the_stored_runs() -> None:
    second = json.loads((CORPUS / "corpus_results_2.json").read_text())
    old = {one["name"]: one for one in json.loads((CORPUS / "corpus_results.json").read_text())}
    first = [old[one["name"]] for one in second]
    rows = {
        "scripts that make updates": lambda runs: str(sum(one["updates"] > 0 for one in runs)),
        "labeled faults found": lambda runs: f"{sum(f['found'] for f in labels(runs))} of {len(labels(runs))}",
        "found within three lines of the label": lambda runs: str(sum(f["line_is_near"] for f in labels(runs))),
    }
    for title, count in rows.items():
        assert f"| {title} | {count(first)} | {count(second)} |" in EVIDENCE


def test_the_counts_of_the_blind_rounds_are_the_stored_ones() -> None:
    cells = {}
    for number in (3, 4, 5):
        found = json.loads((CORPUS / f"blind_results_{number}.json").read_text())
        written, public = found["written"], found.get("public")
        assert sum(found["lines"].values()) == written["found"] + (public["found"] if public else 0)
        plain = f"{written['found_plain']} of {written['faulty']} | {written['found']} of {written['faulty']}"
        accused = f"{written['accused']} of {written['correct']} | {found['fine_although_wrong']} |"
        cells[number] = plain, accused
        if public:
            public_row = f"| {public['found']} of {public['faults_reached']} | | {public['wrong_faults']} wrong FAULT |"
            assert f"| 3, second | {public['scripts']} public scripts | {public_row}" in EVIDENCE
    rows = {int(row[3]): row for row in EVIDENCE.splitlines() if re.match(r"\| \[[345]\]", row)}
    assert [*rows] == [5, 4, 3]  # the newest first
    for number, (plain, accused) in cells.items():
        assert plain in rows[number] and accused in rows[number], rows[number]
    for number in range(6, 19):
        found = json.loads((CORPUS / f"blind_results_{number}.json").read_text())
        it, fine = found["written"], found["fine_although_wrong"]
        counts = f"| {it['found_plain']} of {it['faulty']} | {it['found']} of {it['faulty']} "
        counts += f"| {it['accused_plain']} of {it['correct']} | {it['accused']} of {it['correct']} | {fine} |"
        assert len(found["found_checks"]) == it["found"]
        assert counts in next(row for row in EVIDENCE.splitlines() if row.startswith(f"| [{number}]")), counts
    sets = json.loads((CORPUS / "blind_results.json").read_text())
    found, faulty, accused, correct = (sum(of_set[key] for of_set in sets) for key in COUNTED)
    assert f"| {found} of {faulty} | | {accused} of {correct} |" in EVIDENCE


COUNTED = ("found", "faulty", "accused", "correct")


def labels(runs: list[dict]) -> list[dict]:
    """Return the labeled faults of all scripts."""
    return [label for one in runs for label in one["faults"]]


def test_the_tables_of_faults_in_the_wild_are_those_of_the_labels() -> None:
    assert wild.PAGE.read_text() == wild.page_with_tables(wild.PAGE.read_text())
    assert wild.kinds() in wild.PAGE.read_text()


def test_the_command_does_not_import_torch() -> None:
    """Its first second would be PyTorch's: only the ranks need it."""
    script = "import sys, rankdoctor.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0

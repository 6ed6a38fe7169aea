"""Run the doctor on the public scripts of corpus.toml, and compare what it finds with the labels.

    python corpus/corpus.py                           all scripts, without those that are held out
    python corpus/corpus.py dino vicreg --out r.json  these two; store the results
    python corpus/corpus.py --keep runs --reread      judge again the runs that --keep has kept in the folder runs

It needs git, and in this Python's environment rankdoctor, torchvision, numpy, Pillow, and what the key `needs` names.
Each script is fetched from GitHub at its commit, or taken from a folder with bare repositories (--repositories). It
runs on small generated data (small_data.py, and the key `prepare`). Keys of corpus.toml that are for running only, all
of them optional:

folder      working folder in the repository (default: that of the script)
prepare     commands of bash that are run in the working folder first, such as to write a text file
preload     Python code that is run in each process before the script
options     options of the doctor
resume      arguments that make the script resume
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCTOR = [sys.executable, "-m", "rankdoctor"]
Script = dict[str, Any]
Finding = dict[str, Any]
NEAR = 3
"""lines between a finding and a label that still count as the same place"""
SUBJECTS = {
    "zero gradient": ("gradients_arrive", "weights_change"),
    "weights never initialized": ("finite",),
    "same samples": ("same_samples", "shared_once"),
    "gradients dropped": ("gathered_gradients",),
    "same order each epoch": ("same_order",),
    "validation trained on": ("held_out",),
    "validation counted twice": ("validation_counts",),
    "validation on every rank": ("validation_repeated",),
    "not combined": ("results_combined",),
    "no eval mode": ("validation_mode",),
    "no train mode": ("training_mode",),
    "ranks differ": ("weights_agree", "teachers_agree", "learning_rates_agree", "validation_statistics"),
    "shared file": ("one_writer",),
    "lost state": ("resumed",),
    "epoch repeated": ("resumed",),
    "clipping before unscale": ("clip_scaled",),
    "gradients never cleared": ("gradients_zeroed",),
    "16-bit weights": ("low_precision",),
    "schedule length": ("schedule_length", "other_ranks"),
    "hang": ("hang", "same_collectives", "equal_steps"),
    "no shuffling": ("same_order",),
    "batch norm per rank": ("small_norm",),
    "equal dropout": ("same_dropout",),
    "equal augmentation": ("same_augmentation", "same_workers"),
}
"""for each kind of a label: the checks about the same subject"""
PROVOCATIONS = {"uneven": "--uneven", "nodes": "--two_nodes", "ranks": "--one_rank", "workers": "--workers"}
IMAGES = """
import sys, numpy as np
from pathlib import Path
from PIL import Image
for part, count in (("train", 24), ("val", 8)):
    for number, name in enumerate(("ants", "bees", "cats")):
        folder = Path("imagefolder", part, name)
        folder.mkdir(parents=True)
        for k in range(count):
            pixels = np.random.default_rng(1000 * number + k + 500 * (part == "val")).integers(0, 256, (80, 80, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{k}.jpg")
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    it = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = it.add_argument
    add("names", nargs="*", help="scripts (default: all that are not held out)")
    add("--held_out", action="store_true", help="the scripts that are held out, instead of the others")
    add("--repositories", type=Path, help="folder with bare repositories, each in OWNER+NAME")
    add("--out", type=Path, help="add the results to this JSON file")
    add("--keep", type=Path, help="keep the events of the runs in this folder")
    add("--thorough", action="store_true", help="with all provocations, also where no label needs one")
    add("--reread", action="store_true", help="judge what --keep has kept, without running anything")
    add("--null_gpu", action="store_true", help="with PyTorch's own CUDA code on null GPUs, instead of the stand-in")
    add("--batches", type=int, default=4, help="batches of each pass of a loader (default: 4)")
    add("--steps", type=int, default=40, help="updates after which a run is ended (default: 40)")
    add("--seconds", type=int, default=90, help="time limit of each run (default: 90)")
    return it


def main() -> None:
    """Run the scripts one after another, print a line for each, and store the results."""
    options = parser().parse_args()
    scripts = tomllib.loads((HERE / "corpus.toml").read_text())["script"]
    if options.names:
        scripts = [script for script in scripts if script["name"] in options.names]
    else:
        scripts = [script for script in scripts if script["held_out"] == options.held_out]
    results = []
    for script in scripts:
        result = run_script(script, options)
        results.append(result)
        print(described(result), flush=True)
        if options.out:
            store(options.out, result)
    print(summary(results))


def run_script(script: Script, options: argparse.Namespace) -> dict[str, Any]:
    """Run the doctor on a script, and return what it found beside the labels."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="corpus_") as temporary:
        kept = (options.keep or Path(temporary)) / script["name"]
        root = kept / "repository"
        if options.reread:
            command, folder, environment = [*DOCTOR, "--json", "--reread", str(kept / "runs")], root, {}
        else:
            shutil.rmtree(kept, ignore_errors=True)
            export(script, options.repositories, root)
            command, folder, environment = prepared(script, options, kept)
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        (kept / "stderr").write_text(done.stderr)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            raise SystemExit(f"{script['name']}: no report: {done.stdout[-2000:]} {done.stderr[-2000:]}") from None
        (kept / "report.json").write_text(done.stdout)
        return compared(script, report, root, time.monotonic() - began)


def export(script: Script, repositories: Path | None, root: Path) -> None:
    """Write the files of a script's repository at its commit to a folder."""
    owner, _, name = script["repository"].partition("/")
    root.mkdir(parents=True)
    near = [
        path for path in (repositories or root).glob(f"{owner}+{name}/**/HEAD") if (path.parent / "objects").is_dir()
    ]
    git_folder = near[0].parent if repositories and near else root / ".git"
    git = ["git", "--git-dir", str(git_folder)]
    if git_folder.parent == root:
        subprocess.run([*git, "init", "--quiet"], check=True)
        address = f"https://github.com/{script['repository']}"
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", address, script["commit"]], check=True)
    parent = str(Path(script["path"]).parent)
    for paths in ([], [parent.split("/")[0]], [parent], ["*.py"]):  # a copy can lack large files of other folders
        archive = subprocess.run([*git, "archive", script["commit"], *paths], check=False, capture_output=True)
        if archive.returncode == 0:
            break
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive.stdout, check=True)


def prepared(script: Script, options: argparse.Namespace, kept: Path) -> tuple[list[str], Path, dict[str, str]]:
    """Generate the data of a script; return the command that runs the doctor, its folder, and the environment."""
    root = kept / "repository"
    path = root / script["path"]
    folder = root / script["folder"] if "folder" in script else path.parent
    modules = kept / "modules"
    modules.mkdir()
    (kept / "scratch").mkdir()
    shutil.copy(HERE / "small_data.py", modules)
    (modules / "preload.py").write_text("import small_data\n" + script.get("preload", ""))
    environment = {"PYTHONPATH": f"{modules}:{folder}", "DATADIR": str(folder), "SCRATCH": str(kept / "scratch")}
    environment |= {"CORPUS": str(HERE), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    environment |= dict(entry.split("=", 1) for entry in script.get("environment", []) if "=" in entry)
    if script["data"].startswith("imagefolder"):
        subprocess.run([sys.executable, "-c", IMAGES], cwd=folder, check=True)
    if "prepare" in script:
        python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(
            ["bash", "-ec", script["prepare"]], cwd=folder, env=os.environ | environment | python, check=True
        )
    command = [*DOCTOR, "--json", "--keep", str(kept / "runs"), "--preload", str(modules / "preload.py")]
    command += [f"--{name}={getattr(options, name)}" for name in ("batches", "steps", "seconds")]
    wanted = {fault.get("provocation") for fault in script["faults"] if not fault.get("outside")}
    command += [flag for name, flag in PROVOCATIONS.items() if name in wanted]
    command += ["--thorough"] if options.thorough else []
    command += ["--null_gpu"] if options.null_gpu else []
    if "resume" in wanted:
        command.append(f"--resume={script.get('resume', '')}")
    return [*command, *script.get("options", []), str(path), *script["arguments"]], folder, environment


def compared(script: Script, report: dict[str, Any], root: Path, seconds: float) -> dict[str, Any]:
    """Return the findings, each with the label that it fits, and the labels, each with whether it was found."""
    findings = list(flat(report["findings"], root))
    labels = [label | {"label": kind} for kind in ("faults", "notes") for label in script[kind]]
    for finding in findings:
        fitting = [label for label in labels if fits(finding, label)]
        near = [label for label in labels if is_near(finding, label, script["path"])]
        best = next((label for label in fitting if label in near), (fitting or [None])[0])
        if best:
            finding["fits"] = f"{best['label'].removesuffix('s')}: {best['kind']}"
            finding["line_is_near"] = best in near
        elif near:
            finding["only_near"] = near[0]["kind"]
    faults = []
    for label in (label for label in script["faults"] if not label.get("outside")):
        mine = [f for f in findings if f["kind"] != "COST" and fits(f, label)]
        near = [f for f in findings if f["kind"] != "COST" and is_near(f, label, script["path"])]
        found = {"kind": label["kind"], "line": label["line"], "found": bool(mine)}
        found["line_is_near"] = any(f in near for f in mine)
        if near and not mine:
            found["only_near"] = near[0]["check"]
        faults.append(found | ({"found_by": label["found_by"]} if "found_by" in label else {}))
    result = {"name": script["name"], "held_out": script["held_out"], "seconds": round(seconds), "faults": faults}
    result["updates"] = report["updates"][0] if report["updates"] else 0
    if not result["updates"] or report["errors"]:
        error = (report["errors"] or [None])[0]
        ended = report["runs"][0]["ended"]
        result["error"] = (
            f"{error['type']} at {short(error['at'], root)}: {short(error['text'], root)[:160]}" if error else ended
        )
    return result | {"findings": [f for f in findings if f["kind"] != "COST"]}


def flat(findings: list[Finding], root: Path) -> Iterator[Finding]:
    """Yield findings and their consequences, with what matters here."""
    for finding in findings:
        kept = {key: finding[key] for key in ("kind", "check", "text", "run") if finding[key]}
        yield kept | {"at": short(finding["at"], root)}
        yield from flat(finding["consequences"], root)


def short(text: str, root: Path) -> str:
    """Return a text whose paths are as seen from the root of the repository, or from site-packages."""
    return re.sub(r"/\S*?/(?=site-packages/)", "", text.replace(f"{root}/", ""))


def fits(finding: Finding, label: dict[str, Any]) -> bool:
    """Return whether a finding is about the subject of a label."""
    if "the script fails: " in finding["text"]:
        return label["kind"] == "hang"
    return finding["check"] in SUBJECTS.get(label["kind"], ())


def is_near(finding: Finding, label: dict[str, Any], path: str) -> bool:
    """Return whether a finding names a line of a label, or one near it."""
    file, _, number = finding["at"].rpartition(":")
    for line in [label["line"], *label.get("also", [])]:
        other, _, wanted = line.rpartition(":") if isinstance(line, str) else (path, "", line)
        if file.endswith(other) and number.isdigit() and abs(int(number) - int(wanted)) <= NEAR:
            return True
    return False


def described(result: dict[str, Any]) -> str:
    """Return the lines about a script."""
    lines = [f"{result['name']}: {result['updates']} updates, {result['seconds']} s {result.get('error', '')}"]
    for label in result["faults"]:
        how = "found" if label["found"] else "missed"
        how += ", other line" if label["found"] and not label["line_is_near"] else ""
        how += f", but {label['only_near']} names the line" if "only_near" in label else ""
        lines.append(f"    label {label['kind']} ({label['line']}): {how}")
    for f in result["findings"]:
        fit = f.get("fits") or (f"near: {f['only_near']}" if "only_near" in f else "NO LABEL")
        lines.append(f"    {f['kind']} {f['check']} {f['at']} {f.get('run', '')} [{fit}] {f['text'][:150]}")
    return "\n".join(lines)


def summary(results: list[dict[str, Any]]) -> str:
    """Return the numbers over all scripts."""
    labels = [label for result in results for label in result["faults"]]
    found = [label for label in labels if label["found"]]
    faults = [f for result in results for f in result["findings"] if f["kind"] == "FAULT"]
    near = sum(label["line_is_near"] for label in found)
    return (
        f"{sum(result['updates'] > 0 for result in results)} of {len(results)} scripts made updates; "
        f"{len(found)} of {len(labels)} labeled faults found, {near} of them with a line near that of the label; "
        f"{sum('fits' not in f for f in faults)} of {len(faults)} FAULT findings fit no label"
    )


def store(file: Path, result: dict[str, Any]) -> None:
    """Put the result of a script into a JSON file, one script on each line."""
    results = {old["name"]: old for old in json.loads(file.read_text())} if file.exists() else {}
    results[result["name"]] = result
    file.write_text("[\n" + ",\n".join(json.dumps(one) for one in results.values()) + "\n]\n")


if __name__ == "__main__":
    main()

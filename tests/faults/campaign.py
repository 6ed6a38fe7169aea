"""A campaign of faults: whatever happens to a run, it must end as the pages say, and nothing may be lost.

    python tests/faults/campaign.py --seed 1                        # make test-faults SEED=1
    python tests/faults/campaign.py --seed 1 --only "lesson 05"     # 40 faults of lesson 05's checkpoints

A run is killed, stopped by signals, short of disk, or has a rank that is stopped for good, at moments that follow from
the seed. It is resumed after each fault, and in the end its weights must be, bit for bit, those of a run without
faults. Prints a table and adds it to results/<machine>_faults.json:

    fault     what was done
    times     how often
    handled   how often the run ended as it should: in time, with the status and the line that the pages promise
    lost      how often work was lost: no checkpoint to continue from, or other weights at the end

It ends with status 1 if a fault was not handled or something was lost.
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "tests", "data")]

import fully_sharded  # noqa: E402
from lives import TIMEOUT, Life, Tally, by_hand, by_torchrun, equal, name_of, rank_processes, weights_of  # noqa: E402
from torchvision.datasets import MNIST  # noqa: E402

import downloading  # noqa: E402
from data_helpers import Mirror, contents  # noqa: E402
from lab.measure import RESULTS, machine_name  # noqa: E402
from lab.tables import format_table  # noqa: E402
from slurm_cluster import SlurmCluster, local_cluster  # noqa: E402
from sources import download, generate  # noqa: E402
from workshop.errors import UserError  # noqa: E402
from workshop.hardware import describe_hardware, describe_versions, pick_device  # noqa: E402

TRAIN = REPOSITORY / "03_ddp" / "train.py"
SHORT = ["--limit_train", 240, "--limit_val", 64, "--global_batch_size", 8, "--epochs", 3, "--save_interval", 5]
SHORT += ["--resume", "true"]  # 30 steps an epoch, of a model with dropout
MEMORY, MAP = ["--loader", "memory"], ["--loader", "map", "--num_workers", 1]
UNDER_SLURM = ("USR1, requeue, kill -9 under Slurm", "rank 0 stopped for good, srun")
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


@dataclass
class Plan:
    """A kind of run, and its result without faults."""

    start: Callable[..., Life]
    ranks: int
    flags: list
    folder: Path
    seconds: float = 0.0
    script: Path = TRAIN

    def live(self, run_dir: Path) -> Life:
        """Begin the next life of the run in this folder."""
        return self.start(self.script, [*self.flags, "--run_dir", run_dir], run_dir.parent, self.ranks)

    def is_whole(self, run_dir: Path) -> bool:
        """Whether the run in this folder ended with the weights of one without faults."""
        whole = self.folder / "whole" / "run"
        if not whole.exists():
            began = time.monotonic()
            life = self.live(whole)
            assert life.wait() == [0] * len(life.processes), life.printed()
            self.seconds = time.monotonic() - began
        return run_dir == whole or equal(weights_of(run_dir), weights_of(whole))


def fault_after_fault(tally: Tally, plan: Plan, times: int, chance: random.Random, strike: Callable) -> Tally:
    """Strike a run at random moments, ``times`` times; begin another one whenever one has ended.

    ``strike(life, chance)`` returns what it did and whether the life that it struck ended as it should.
    """
    plan.is_whole(plan.folder / "whole" / "run")
    run, since = 0, 0
    while True:
        run_dir = plan.folder / f"run{run}" / "run"
        life = plan.live(run_dir)
        last = tally.times >= times
        ended = False
        if not last:
            end = time.monotonic() + chance.uniform(0, plan.seconds)
            while time.monotonic() < end and not ended:
                ended = all(process.poll() is not None for process in life.processes)
                time.sleep(0.002)
        if last or ended:  # not struck: it goes to its end, and that must be the right one
            right = life.wait() == [0] * len(life.processes)
            if not right or not plan.is_whole(run_dir):
                tally.lost += max(since, 1)
                tally.strange.append(f"{run_dir}: resumed after {since} faults, with another result\n{life.printed()}")
            run, since = run + 1, 0
            if last:
                return tally
        else:
            what, handled = strike(life, chance)
            tally.count(handled, f"{what}\n{life.printed()}")
            since += 1


def kill(life: Life, chance: random.Random) -> tuple[str, bool]:
    """Kill one rank; the others must end within a minute and say which one is lost, or which did not join."""
    victim = chance.randrange(len(life.processes))
    life.processes[victim].kill()
    statuses = life.wait()
    if statuses is None:
        return f"kill -9 of rank {victim}, then a hang", False
    others = [status for rank, status in enumerate(statuses) if rank != victim]
    reported = (f"rank {victim} is lost", "not all ranks joined", "cannot reach")
    named = any(words in life.printed() for words in reported)
    return f"kill -9 of rank {victim}: {statuses}", all(s == 0 or (s in (1, 2) and named) for s in others)


def send_signal(life: Life, chance: random.Random) -> tuple[str, bool]:
    """Signal one rank or all; all must save and stop with status 0, or end of it before there is anything to save."""
    number = chance.choice(STOP_SIGNALS)
    chosen = life.processes if chance.random() < 0.5 else [chance.choice(life.processes)]
    for process in chosen:
        process.send_signal(number)
    statuses = life.wait()
    what = f"{name_of(number)} to {len(chosen)} of {len(life.processes)}: {statuses}"
    if statuses is None:
        return what, False
    early = {-number, 128 + number} & set(statuses)  # it did not handle signals yet
    quiet = "Traceback" not in life.printed()
    return what, quiet and (set(statuses) == {0} or (bool(early) and set(statuses) <= {-number, 128 + number, 0, 1, 2}))


def kill_under_torchrun(life: Life, chance: random.Random) -> tuple[str, bool]:
    """Kill a rank, or torchrun itself with SIGTERM; all of it must end."""
    ranks = rank_processes(life.folder)
    if ranks and chance.random() < 0.7:
        victim = chance.choice(sorted(ranks))
        os.kill(ranks[victim], signal.SIGKILL)
        what = f"kill -9 of rank {victim} under torchrun"
    else:
        life.processes[0].terminate()
        what = "SIGTERM to torchrun"
    statuses = life.wait()
    time.sleep(0.5)
    left = [process for process in rank_processes(life.folder).values() if Path(f"/proc/{process}").exists()]
    return f"{what}: {statuses}, left: {left}", statuses is not None and not left


def no_space(tally: Tally, plan: Plan, times: int, chance: random.Random) -> Tally:
    """Let a run's disk, a tmpfs of random size, be too small for its checkpoints; then enlarge it and resume."""
    disk = plan.folder / "disk"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        tally.remark = "mounting is not permitted here"
        return tally
    subprocess.run(["umount", str(disk)], check=True)
    plan.is_whole(plan.folder / "whole" / "run")
    files = [plan.folder / "whole" / "run" / name for name in ("checkpoint.pt", "checkpoint.sharded")]
    size = sum(part.stat().st_size for file in files for part in (file, *file.glob("*")) if part.is_file())
    for _ in range(times):
        small = int(chance.uniform(0.001, 3.2) * size)
        subprocess.run([*mount[:4], f"size={small}", *mount[5:]], check=True)
        try:
            run_dir = disk / "run"
            flags = [*plan.flags, "--run_dir", run_dir]
            life = plan.start(plan.script, flags, plan.folder / "logs", plan.ranks)
            statuses = life.wait()
            lines = [line for line in life.printed().splitlines() if line.startswith("error: ")]
            one_line = statuses == [2] * plan.ranks and len(lines) == 1 and "No space left" in lines[0]
            quiet = "Traceback" not in life.printed()
            tally.count(
                quiet and (one_line or statuses == [0] * plan.ranks), f"{small} bytes: {statuses}\n{life.printed()}"
            )
            subprocess.run(["mount", "-o", f"remount,size={8 * size}", str(disk)], check=True)
            life = plan.start(plan.script, flags, plan.folder / "logs", plan.ranks)
            if life.wait() != [0] * plan.ranks or not plan.is_whole(run_dir):
                tally.lost += 1
                tally.strange.append(f"{small} bytes, then enough\n{life.printed()}")
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
    return tally


def spoil(mirror: Mirror, chance: random.Random) -> str:
    """Give a mirror a fault."""
    name = chance.choice(sorted(mirror.pages))
    fault = chance.choice(["cut short", "wrong length", "dripping", "dripping headers", "wrong bytes", "not found"])
    if fault == "cut short":
        mirror.cut = chance.randint(1, 2000)
    elif fault == "wrong length":
        mirror.length = chance.choice(["many", "-1", str(chance.randint(0, 10**9))])
    elif fault == "dripping":
        mirror.pause = 0.02
    elif fault == "dripping headers":
        mirror.header_pause = 0.02
    elif fault == "wrong bytes":
        content = bytearray(mirror.pages[name])
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        mirror.pages[name] = bytes(content)
    else:
        mirror.pages[name] = None
    return fault


def bad_servers(tally: Tally, folder: Path, data: Path, times: int, chance: random.Random) -> Tally:
    """Download from two mirrors of which one or both have a fault, then from good ones."""
    packed = {f"/{name}.gz": gzip.compress(content) for name, content in contents(data).items()}
    MNIST.resources = [(path[1:], hashlib.md5(content).hexdigest()) for path, content in packed.items()]
    downloading.PERIOD_SECONDS = 2.0
    os.environ["no_proxy"] = "127.0.0.1"
    for time_ in range(times):
        here = folder / str(time_)
        mirrors = [Mirror(), Mirror()]
        bad = chance.sample(mirrors, chance.randint(1, 2))
        for mirror in mirrors:
            mirror.pages = dict(packed)
        MNIST.mirrors = [mirror.address for mirror in mirrors]
        faults = [spoil(mirror, chance) for mirror in bad]
        began = time.monotonic()
        try:
            download("mnist", here)
            handled, ended = contents(here) == contents(data), "it was complete"
        except UserError as error:
            handled = len(bad) == 2 and not (here / "MNIST" / "raw").exists()
            ended = str(error)
        except Exception as error:
            handled, ended = False, repr(error)
        tally.count(handled and time.monotonic() - began < TIMEOUT, f"{faults}: {ended}")
        for mirror in mirrors:
            mirror.cut, mirror.length, mirror.pause, mirror.header_pause = 0, None, 0.0, 0.0
            mirror.pages = dict(packed)
        download("mnist", here)
        tally.lost += contents(here) != contents(data)
        for mirror in mirrors:
            mirror.close()
    return tally


class Jobs:
    """A copy of lesson 03 whose jobs all continue one run, on a local cluster."""

    def __init__(self, slurm: SlurmCluster, folder: Path, data: Path) -> None:
        self.slurm, self.run_dir, self.lesson = slurm, folder / "run", folder / "03_ddp"
        shutil.copytree(REPOSITORY / "slurm", folder / "slurm")
        shutil.copytree(REPOSITORY / "03_ddp", self.lesson)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = f"WORKSHOP_DATA={data},WORKSHOP_RUNS={folder},PYTHONPATH={REPOSITORY}"
        self.options = [f"--export=ALL,PATH={path},{variables}", "--cpus-per-task=1", "job.slurm"]

    def submit(self, *flags: object) -> int:
        """Submit a job; return its number."""
        return self.slurm.submit(*self.options, *map(str, flags), "--run_dir", self.run_dir, cwd=self.lesson)

    def state(self, job: int) -> str:
        return self.slurm.job(job)["JobState"]

    def wait_until_running(self, job: int) -> None:
        """Wait, also for a requeued job."""
        end = time.monotonic() + TIMEOUT
        while self.state(job) not in ("RUNNING", "COMPLETED", "FAILED") and time.monotonic() < end:
            time.sleep(0.2)

    def log(self, job: int) -> str:
        file = self.lesson / f"{job}.log"
        return file.read_text(errors="replace") if file.exists() else ""


def under_slurm(tally: Tally, plan: Plan, slurm: SlurmCluster, data: Path, times: int, chance: random.Random) -> Tally:
    """Signal a job as at its time limit, requeue it as an administrator would, or kill one of its ranks."""
    plan.is_whole(plan.folder / "whole" / "run")
    jobs = Jobs(slurm, plan.folder / "jobs", data)
    flags = [*plan.flags, "--epochs", 6]  # a job is started anew in ten seconds at best: let there be time
    job = jobs.submit(*flags)
    faults = ["USR1", "requeue", "kill"]
    for number in range(times):
        jobs.wait_until_running(job)
        time.sleep(chance.uniform(0, 12))
        fault, before = faults[number % 3], slurm.job(job)
        if before["JobState"] != "RUNNING":
            job = jobs.submit(*flags)  # it had ended
            jobs.wait_until_running(job)
            before = slurm.job(job)
        if fault == "USR1":
            slurm.run("scancel", "--signal=USR1", str(job))
        elif fault == "requeue":
            slurm.run("scontrol", "requeue", str(job))
        elif ranks := rank_processes(plan.folder / "jobs"):
            os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL)
        end = time.monotonic() + TIMEOUT
        while (now := slurm.job(job))["JobState"] in ("RUNNING", "COMPLETING") and time.monotonic() < end:
            if now["Restarts"] != before["Restarts"]:
                break
            time.sleep(0.2)
        again = now["Restarts"] != before["Restarts"] or now["JobState"] in ("PENDING", "REQUEUED")
        handled = now["JobState"] == "COMPLETED" or (now["JobState"] == "FAILED" if fault == "kill" else again)
        tally.count(handled, f"{fault}: {now['JobState']}, {now['Restarts']} restarts\n{jobs.log(job)}")
        if not again:
            job = jobs.submit(*flags)
    if slurm.wait(job, TIMEOUT * 2) != "COMPLETED" or not plan.is_whole(jobs.run_dir):
        tally.lost += times
        tally.strange.append(jobs.log(job))
    return tally


def stopped_rank(tally: Tally, start: Callable[[], Callable[[], str]], folder: Path) -> Tally:
    """Stop rank 0 at step 20, for good; rank 1 must end within a minute and say that rank 0 is lost.

    ``start()`` begins a run of two ranks in the folder, and returns a function that returns its output.
    """
    output = start()
    end = time.monotonic() + TIMEOUT
    while not re.search(r"step +20/", output()) and time.monotonic() < end:
        time.sleep(0.02)
    ranks = rank_processes(folder)
    os.kill(ranks[0], signal.SIGSTOP)
    began = time.monotonic()
    while 1 in rank_processes(folder) and time.monotonic() < began + 2 * TIMEOUT:
        time.sleep(0.1)
    seconds = time.monotonic() - began
    for process in rank_processes(folder).values():
        os.kill(process, signal.SIGKILL)
    tally.count(seconds < 60 and "rank 0 is lost" in output(), f"rank 1 ended after {seconds:.0f} s\n{output()}")
    tally.remark = f"{seconds:.0f} s"
    return tally


def strikes_on_lesson_05(folder: Path) -> dict[str, Callable[[Tally, random.Random], Tally]]:
    """Return the faults of each form of lesson 05's checkpoints: 40 in all."""

    def plan(form: str, name: str) -> Plan:
        flags = [*fully_sharded.SHORT, *fully_sharded.FORMS[form]]
        here = folder / f"05 {form}"
        return Plan(by_hand, 2, flags, here / name, script=REPOSITORY / "05_fully_sharded" / "train.py")

    def killed(tally: Tally, form: str, times: int, chance: random.Random) -> Tally:
        def strike(life: Life, chance: random.Random) -> tuple[str, bool]:
            return fully_sharded.kill_some(life, chance, kill)

        return fault_after_fault(tally, plan(form, "killed"), times, chance, strike)

    def killed_while_saving(tally: Tally, form: str, times: int, chance: random.Random) -> Tally:
        def strike(life: Life, chance: random.Random) -> tuple[str, bool]:
            struck = fully_sharded.kill_while_saving(life, life.folder / "run", chance, kill)
            return struck or ("ended before it saved again", life.wait() == [0] * len(life.processes))

        return fault_after_fault(tally, plan(form, "saving"), times, chance, strike)

    def works_of(form: str, times: tuple[int, int, int, int, int]) -> dict:
        name = f"lesson 05, {form}: "
        return {
            name + "kill -9": lambda t, c: killed(t, form, times[0], c),
            name + "kill -9 while saving": lambda t, c: killed_while_saving(t, form, times[1], c),
            name + "signals": lambda t, c: fault_after_fault(t, plan(form, "signalled"), times[2], c, send_signal),
            name + "damage": lambda t, c: fully_sharded.damaged_between(t, plan(form, "damaged"), times[3], c, kill),
            name + "disk full": lambda t, c: no_space(t, plan(form, "full"), times[4], c),
        }

    times = {"whole": (2, 4, 2, 3, 2), "sharded": (2, 4, 2, 4, 2), "sharded, async": (3, 3, 3, 3, 1)}
    return {name: work for form in times for name, work in works_of(form, times[form]).items()}


def campaign(seed: int, folder: Path, only: str) -> list[Tally]:
    """Run all of it; several kinds at once, because most of them mostly wait."""
    data = folder / "data"
    generate("mnist", data, train_samples=400, val_samples=100, seed=7)
    os.environ["WORKSHOP_DATA"] = str(data)
    state = folder / "slurm"
    wanted = any(only in name for name in UNDER_SLURM)
    slurm = SlurmCluster(state) if wanted and local_cluster(state, "up").returncode == 0 else None

    def plan(name: str, start: Callable[..., Life], ranks: int, loader: Sequence[object]) -> Plan:
        return Plan(start, ranks, [*SHORT, *loader], folder / name)

    one, mapped = plan("one", by_hand, 1, MEMORY), plan("map", by_hand, 1, MAP)
    two, torchrun = plan("two", by_hand, 2, MEMORY), plan("torchrun", by_torchrun, 2, MAP)
    long = [*SHORT[:-2], *MEMORY, "--epochs", 500, "--log_interval", 1]

    def life_in(name: str, start: Callable[..., Life]) -> Callable[[], Callable[[], str]]:
        flags = [*long, "--run_dir", folder / name / "run"]
        return lambda: start(TRAIN, flags, folder / name, 2, sys.executable).printed

    def job_in(name: str) -> Callable[[], str]:
        jobs = Jobs(slurm, folder / name, data)
        job = jobs.submit(*long)
        return lambda: jobs.log(job)

    works: dict[str, Callable[[Tally, random.Random], Tally]] = {
        "rank 0 stopped for good, by hand": lambda t, _: stopped_rank(t, life_in("hand", by_hand), folder / "hand"),
        "rank 0 stopped for good, torchrun": lambda t, _: stopped_rank(t, life_in("tr", by_torchrun), folder / "tr"),
        "kill -9, 1 rank": lambda t, c: fault_after_fault(t, one, 12, c, kill),
        "signals, 1 rank": lambda t, c: fault_after_fault(t, one_signalled, 12, c, send_signal),
        "kill -9, 1 rank with a loader worker": lambda t, c: fault_after_fault(t, mapped, 6, c, kill),
        "signals, 2 ranks": lambda t, c: fault_after_fault(t, two_signalled, 8, c, send_signal),
        "kill -9 of one of 2 ranks": lambda t, c: fault_after_fault(t, two, 5, c, kill),
        "kill -9 and SIGTERM under torchrun": lambda t, c: fault_after_fault(t, torchrun, 4, c, kill_under_torchrun),
        "disk full": lambda t, c: no_space(t, plan("full", by_hand, 1, MEMORY), 5, c),
        "bad servers": lambda t, c: bad_servers(t, folder / "servers", data, 12, c),
    }
    works |= strikes_on_lesson_05(folder)
    one_signalled, two_signalled = plan("one_signalled", by_hand, 1, MEMORY), plan("two_signalled", by_hand, 2, MEMORY)
    if slurm:
        jobs = plan("jobs", by_hand, 2, [*MEMORY, "--epochs", 6])
        works = {
            UNDER_SLURM[0]: lambda t, c: under_slurm(t, jobs, slurm, data, 3, c),
            UNDER_SLURM[1]: lambda t, _: stopped_rank(t, lambda: job_in("srun"), folder / "srun"),
        } | works
    works = {name: work for name, work in works.items() if only in name}
    try:
        with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool:
            begun = {
                name: pool.submit(work, Tally(name), random.Random(f"{seed} {name}")) for name, work in works.items()
            }
            tallies = []
            for name, future in begun.items():
                try:
                    tallies.append(future.result())
                except Exception as error:
                    tallies.append(Tally(name, times=1, remark="the campaign itself failed", strange=[repr(error)]))
        return tallies
    finally:
        if slurm:
            local_cluster(state, "down")


def main() -> None:
    """Run the campaign of a seed, print its table, and add it to this machine's results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="the faults whose names contain this, and no others")
    arguments = parser.parse_args()
    seed = arguments.seed
    os.environ.pop("RANK", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tallies = campaign(seed, Path(folder), arguments.only)
    rows = [
        {"fault": t.fault, "times": t.times, "handled": t.handled, "lost": t.lost, "remark": t.remark} for t in tallies
    ]
    header = ["fault", "times", "handled", "lost", "remark"]
    for tally in tallies:
        for report in tally.strange:
            print(f"=== {tally.fault}: {report[-6000:]}\n")
    print(format_table(header, [[str(row[key]) for key in header] for row in rows], left=(0, 4)))
    bad = any(tally.strange or tally.lost for tally in tallies)
    file = RESULTS / f"{machine_name()}_faults.json"
    record = json.loads(file.read_text())["faults"] if file.exists() else {"seeds": {}}
    kept = {row["fault"]: row for row in record["seeds"].get(str(seed), [])}
    record["seeds"][str(seed)] = list((kept | {row["fault"]: row for row in rows}).values())
    record |= {
        "date": date.today().isoformat(),
        "command": "make test-faults SEED=<seed>",
        "hardware": describe_hardware(pick_device()),
        "versions": describe_versions(),
    }
    file.write_text(json.dumps({"faults": record}, indent=2) + "\n")
    print(f"{time.monotonic() - began:.0f} s; written to {file.relative_to(REPOSITORY)}")
    sys.exit(bad)


if __name__ == "__main__":
    main()

"""Measure trainings on this GPU: milliseconds of an update, peak memory, and the kernels that take the longest.

    python lab/studies/gpu_trainings.py --folder DIR
    python lab/studies/gpu_trainings.py --folder DIR --only gpt2 --steps 5

They are the trainings of clock_workloads.py, whose speed was published, the loops of clock_changes.py and the other
kinds of clock_others.py, so a simulated GPU can be compared with a real one. Inputs are random, not zeros, because a
GPU needs less power for zeros. DIR/trainings.json is written after each; when it is called again, it measures what is
missing.
"""

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import clock_changes  # noqa: E402
import clock_others  # noqa: E402
import clock_workloads  # noqa: E402
import torch  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from lab.flags import Parser  # noqa: E402
from lab.results import provenance  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402
from workshop.jsonfile import read_json, write_json  # noqa: E402

STEPS, FEWER = 30, 12
"""updates of a training; fewer of those that take more than half a second each"""
FIRST = 4
"""updates that are not timed"""
FIRST_COMPILED = 8
PROFILED = 4
"""updates whose kernels are listed"""
LISTED = 60
STUDIES = ("clock_changes", "clock_others", "clock_workloads")
CLASSES = 1000
"""random labels and tokens are smaller than this"""


@dataclass(frozen=True)
class Training:
    """A training of one of the two studies."""

    study: str
    """workloads, changes or others"""
    name: str
    option: str
    steps: int = STEPS
    seconds: float = 0
    """that it took on an H200 without its profile; 0 if it was not measured"""

    @property
    def title(self) -> str:
        """Its name in the file."""
        return f"{self.name} {self.option}".strip()

    def run(self, steps: int) -> None:
        """Make so many updates."""
        if self.study == "changes":
            clock_changes.STEPS = steps
            clock_changes.train(self.option)
            return
        if self.study == "others":
            clock_others.STEPS = steps
            clock_others.OTHERS[self.name]()
            return
        clock_workloads.STEPS = steps
        getattr(clock_workloads, self.name)(self.option)


TRAININGS = (
    Training("changes", "changes", "plain", 100, 1.0),
    Training("changes", "changes", "item", 100, 0.6),
    Training("changes", "changes", "pageable", 100, 0.6),
    Training("changes", "changes", "graph", 100, 0.5),
    Training("changes", "changes", "small", 100, 0.5),
    Training("changes", "changes", "small graph", 100, 0.1),
    Training("workloads", "resnet50", "tf32", STEPS, 4.3),
    Training("workloads", "resnet50", "amp"),
    Training("workloads", "gpt2", "slow"),
    Training("workloads", "gpt2", "fast", STEPS, 2.1),
    Training("workloads", "unet", "tf32", STEPS, 4.0),
    Training("workloads", "unet", "amp"),
    Training("workloads", "vit", "amp"),
    Training("workloads", "unet", "fp32", FEWER, 8.9),
    Training("workloads", "vit", "tf32", FEWER, 8.9),
    Training("workloads", "vit", "fp32", FEWER),
    *(Training("others", name, "") for name in clock_others.OTHERS),
    Training("workloads", "gpt2", "compiled"),
)


class Ends:
    """The ends of updates, on the GPU and on the host."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.host: list[float] = []
        self.noting = False
        register_optimizer_step_post_hook(self.stepped)
        replay = torch.cuda.CUDAGraph.replay

        def noted_replay(graph: torch.cuda.CUDAGraph) -> None:
            replay(graph)
            self.stepped()

        torch.cuda.CUDAGraph.replay = noted_replay

    def stepped(self, *_: Any) -> None:  # noqa: ANN401
        """Note the end of an update; those that a graph captures are none."""
        if self.noting and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
            self.host.append(time.perf_counter())

    def figures(self, skip: int) -> dict[str, float]:
        """Return the times of an update without the first ones."""
        events, host = self.events[skip:], self.host[skip:]
        if len(events) < 2:
            return {}
        each = sorted(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
        return {
            "ms": events[0].elapsed_time(events[-1]) / len(each),
            "median": each[len(each) // 2],
            "host_ms": 1e3 * (host[-1] - host[0]) / len(each),
        }


@contextmanager
def random_inputs() -> Iterator[None]:
    """Let ``torch.zeros`` return random numbers to the studies, which fill their inputs with zeros."""
    zeros = torch.zeros

    def random(*size: Any, **how: Any) -> torch.Tensor:  # noqa: ANN401
        if sys._getframe(1).f_globals["__name__"] not in STUDIES:  # PyTorch calls it too
            return zeros(*size, **how)
        if how.get("dtype") == torch.long:
            return torch.randint(10 if how.get("device") is None else CLASSES, size, **how)
        return torch.randn(*size, **how)

    torch.zeros = random
    try:
        yield
    finally:
        torch.zeros = zeros


def reset() -> None:
    """Free the memory, and set what a training may change as in a new process."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False
    torch.compiler.reset()


def measured(training: Training, ends: Ends, steps: int, traces: Path | None) -> dict[str, Any]:
    """Return times, memory and longest operations of a training; store its trace in the folder ``traces``."""
    reset()
    ends.events, ends.host, ends.noting = [], [], True
    began = time.perf_counter()
    error = caught(lambda: training.run(steps))
    ends.noting = False
    row: dict[str, Any] = {"name": training.title, "seconds": time.perf_counter() - began, "updates": len(ends.events)}
    row |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "error": error}
    if error:
        return row
    row |= ends.figures(min(FIRST_COMPILED if training.option == "compiled" else FIRST, steps // 2))
    if training.option != "compiled" and not torch.cuda.get_device_name().startswith("null GPU"):
        row |= profiled(training, traces)
    return row


def profiled(training: Training, traces: Path | None) -> dict[str, Any]:
    """Return the operations that take the longest, with their shapes, in some more updates."""
    reset()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as profiler:
        error = caught(lambda: training.run(PROFILED))
    if error:
        return {"profile_error": error}
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(traces / f"{training.title.replace(' ', '_')}.json.gz"))
    found = [
        [one.key, str(one.input_shapes)[:160], one.count, one.self_device_time_total]
        for one in profiler.key_averages(group_by_input_shape=True)
        if one.self_device_time_total > 0
    ]
    found.sort(key=lambda row: -row[3])
    return {"ops": found[:LISTED], "total_us": sum(row[3] for row in found), "profiled_updates": PROFILED}


def caught(run: Callable[[], None]) -> str:
    """Run something, and return its error; "" if there is none. The other trainings are worth having."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:
        return repr(error)[:300]
    return ""


def main() -> None:
    """Measure the trainings that are missing in the file."""
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder for trainings.json")
    parser.add_argument("--only", default="", metavar="WORD", help="part of the names of the trainings to measure")
    parser.add_argument("--steps", type=int, help="updates of each training (default: 12 to 100)")
    parser.add_argument("--traces", type=Path, help="folder for a trace of torch.profiler of each")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="small loops only, for a null GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("this machine has no NVIDIA GPU")
    chosen = [one for one in TRAININGS if arguments.only in one.title]
    if arguments.tiny == "true":
        chosen = [one for one in chosen if one.option in ("plain", "small graph")]
        clock_changes.BATCH = clock_changes.SMALL = 2
        arguments.steps = 4
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "trainings.json"
    found = read_json(file)
    rows: list[dict[str, Any]] = [row for row in found.get("rows", []) if not row["error"]]
    done, ends = {row["name"] for row in rows}, Ends()
    with random_inputs():
        for training in chosen:
            if training.title in done:
                continue
            rows.append(measured(training, ends, arguments.steps or training.steps, arguments.traces))
            write_json(file, {"gpu": torch.cuda.get_device_name(), **provenance(), "rows": rows})
            row = rows[-1]
            figures = f"{row['ms']:9.3f} ms per update" if "ms" in row else ""
            print(f"{row['name']:22} {row['seconds']:6.1f} s {figures}  {row['peak'] / 1e9:.2f} GB", flush=True)
            if row["error"]:
                print(f"note: {row['name']}: {row['error']}", flush=True)


if __name__ == "__main__":
    run_reporting_user_errors(main)

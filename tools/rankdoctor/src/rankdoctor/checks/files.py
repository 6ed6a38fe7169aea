"""Files that the script writes, and what checkpoints hold."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ..events import Event
from ..runs import Run
from .base import Finding, check, fault, hint, need, need_use, seen, some


@check("Every file is written by one rank.", ranks=True)
def one_writer(run: Run) -> Iterator[Finding]:
    """Ranks that write a file at the same time can leave a mixture of two versions, which cannot be read."""
    writers, places = defaultdict(set), {}
    for rank in run.ranks:
        for e in rank.all("write"):
            if not e["file"].endswith(".lock"):  # it is there for several ranks
                writers[e["file"]].add(rank.number)
                places[e["file"]] = e
    need_use(writers, "files")
    seen(len(writers), "files")
    shared = [places[file] for file, who in writers.items() if len(who) > 1]
    saved = [e for e in shared if e["how"] == "save"]
    for found in (saved, [e for e in shared if e["how"] != "save"]):
        if found:
            names = sorted({Path(e["file"]).name for e in found})
            number = len(writers[found[0]["file"]])
            what = "the same file" if len(names) == 1 else f"the same {len(names)} files"
            text = f"{number} ranks write {what} ({some(names)})"
            certain = found is saved and run.launch.nodes == 1
            fix = "let rank 0 alone write" + (", if the nodes share the folder" if run.launch.nodes > 1 else "")
            yield (fault if certain else hint)(found[0]["at"], text, fix)
    need(
        not run.launch.moved and not run.launch.written,
        "a library in C or Rust wrote files, and which rank it was is not known",
    )


@check(
    "A file that one rank writes has whole tensors.",
    exercise="half_a_checkpoint",
    ranks=True,
)
def shards_saved(run: Run) -> Iterator[Finding]:
    """Sharded tensors in a file of one rank are only that rank's part of the weights."""
    need_use(run.any("save"), "torch.save")
    need_use(run.sharded, "sharded weights")
    saves = {rank.number: [e for e in rank.all("save") if e["shards"] and e["file"]] for rank in run.ranks}
    writers = [number for number, events in saves.items() if events]
    seen(sum(e["tensors"] for rank in run.ranks for e in rank.all("save")), "tensors in files of torch.save")
    if len(writers) == 1:  # several ranks may each save their own part
        e = saves[writers[0]][0]
        yield fault(
            e["at"],
            f"rank {writers[0]} alone saves {e['shards']} tensors of which it has a part only",
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) on all ranks, or "
            "torch.distributed.checkpoint",
        )


@check("Checkpoints are loaded to the GPU of the rank that loads them.", ranks=True)
def loaded_to_own_gpu(run: Run) -> Iterator[Finding]:
    """Without map_location, tensors that rank 0 saved from its GPU are loaded to that GPU by all ranks, and fill it."""
    # a file that the rank has written itself has tensors of its own GPU
    saved = {rank.number: {e["file"] for e in rank.all("save") if e["on_gpu"]} for rank in run.ranks}
    foreign = {number: set().union(*(saved[n] for n in saved if n != number)) - saved[number] for number in saved}
    loads = [(rank.number, e) for rank in run.ranks for e in rank.all("load") if e["file"] in foreign[rank.number]]
    need_use(loads, "torch.load of checkpoints with tensors from the GPU of another rank")
    seen(len(loads), "calls of torch.load")
    for rank, e in [(rank, e) for rank, e in loads if rank and not e["located"]][:1]:
        yield hint(
            e["at"],
            f"rank {rank} loads {Path(e['file']).name} without map_location: its tensors, saved from the GPU of "
            "rank 0, go to that GPU, once for each rank",
            'torch.load(file, map_location="cpu"), or the device of the rank',
        )


@check("Names in checkpoints are those of the model.", exercise="replicas_saved")
def wrapped_names(run: Run) -> Iterator[Finding]:
    """The state of a wrapped model has "module." before each name, so the model itself cannot load it."""
    saves = run.first.all("save")
    need_use(saves, "torch.save")
    seen(sum(e["tensors"] for e in saves), "names of tensors in files of torch.save")
    for e in [e for e in saves if e["wrapped"]][:1]:
        yield hint(
            e["at"],
            f'{e["wrapped"]} of {e["tensors"]} names in the checkpoint begin with "module."',
            "save ddp_model.module.state_dict()",
        )
    need(not run.any("compiled"), "torch.compile, which is off here, puts _orig_mod. before the names")


@check("Each worker opens its files itself.")
def own_handles(run: Run) -> Iterator[Finding]:
    """A file that was open before workers are forked has one position for all of them, so reads of two of them mix."""
    need_use(any(e["workers"] for e in run.first.all("loader")), "workers of a loader")
    need(run.launch.provocation != "workers", "the loaders of this run have no workers")
    events = [e for rank in run.ranks for e in rank.workers if e["e"] == "handles"]
    need(events, "no first batch of a worker was seen")
    need_use(any(e["handles"] for e in events), "open files in data sets")
    shared: dict[tuple[str, str, str], Event] = {}
    for e in events:
        for path, kind, inherited, used in e["handles"]:
            if inherited and used:
                shared.setdefault((e["dataset"], path, kind), e)
    for (dataset, path, kind), e in list(shared.items())[:1]:
        made = next((one["at"] for one in run.first.all("loader") if one["dataset"] == dataset), "?")
        what = kind if kind == "file" or kind.endswith("archive") else f"{kind} handle"
        text = f"workers use {dataset}{path}, an open {what} that they have inherited from the process of the rank"
        text += ", so that all of them move one position" if what == kind else ""
        text += f" (and {len(shared) - 1} more)" if len(shared) > 1 else ""
        fix = "open it in the worker: at the first __getitem__, or in worker_init_fn"
        yield (hint if e["locked"] else fault)(e["lines"].get(path, made), text, fix)
    seen(sum(not inherited for e in events for *_, inherited, _ in e["handles"]), "files that workers have opened")


@check("What was loaded is not kept on the GPU.")
def loads_kept(run: Run) -> Iterator[Finding]:
    """A checkpoint on the GPU beside the model takes its memory again: then only the resumed run needs too much."""
    kept = [e for rank in run.ranks for e in rank.all("kept")]
    need_use(kept, "torch.load before the training")
    for e in kept:
        on_gpu = e["where"].startswith(("cuda", "device(type='cuda")) or e["where"].isdecimal()
        if on_gpu and e["size"] > 0.5 * e["beside"] > 0:
            text = (
                f"what this line loads to the GPU is still in memory two updates later: "
                f"{e['size'] / e['beside']:.1f} times the size of the weights"
            )
            yield hint(e["at"], text, 'map_location="cpu", or del the name after load_state_dict')
            return
    need(all(e["size"] <= 0.1 * e["beside"] or e["where"] == "cpu" for e in kept), "a part of it is kept")
    seen(len(kept), "loaded files, of which nothing is kept on the GPU")


@check("A state that is kept stays as it was.")
def kept_states(run: Run) -> Iterator[Finding]:
    """`state_dict()` returns the weights themselves: without a copy, the best weights become the last ones."""
    used = run.first.all("kept_state")
    need_use(used, "a state of its model that it keeps over updates and uses then")
    loaded = [e for e in used if e["how"] == "load"]
    # a state from before the training may be meant as a view of the newest weights
    saved = [e for e in used if e["how"] == "save" and e["began"] > 0]
    for e in (loaded or saved)[:1]:
        what = "loads into the model the weights that it has" if loaded else "saves the weights of now"
        text = (
            f"{_line(e['at'])} {what}: the state that this line keeps after {e['began']} updates shares their memory, "
            f"so {len(e['names'])} weights in it have changed in the {e['step'] - e['began']} updates since"
        )
        yield (fault if loaded else hint)(e["made"], text, "keep a copy: copy.deepcopy(model.state_dict())")
    need(False, "a state from before the training is saved later, which may be meant")


def _line(at: str) -> str:
    return at.rsplit("/", 1)[-1]

"""Faults in which samples, targets and random numbers the ranks and their workers get."""

from collections.abc import Callable

from doctor_events import SAMPLES, TRAIN, add, at, change
from faulty import faulty
from faulty_processes import stream
from rankdoctor.runs import Run


def set_samples(run: Run, prefix: str, *parts: list[int]) -> None:
    for rank, part in enumerate(parts):
        for name in run.samples:
            if name.startswith(f"{prefix}{rank}_"):
                run.samples[name] = part


@faulty("same_samples", "FAULT", 10)
def every_rank_draws_the_same_with_replacement(run: Run) -> None:
    draws(run, [0, 3, 3, 5, 9, 0, 7, 1], [0, 3, 3, 5, 9, 0, 7, 1])


def draws(run: Run, *orders: list[int]) -> None:
    for rank, order in enumerate(orders):
        for epoch, name in enumerate(sorted(name for name in run.samples if name.startswith(f"{rank}_"))):
            run.samples[name] = [(n + 5 * epoch) % SAMPLES for n in order]


@faulty("same_samples", "FAULT", 10)
def every_rank_has_all(run: Run) -> None:
    set_samples(run, "", list(range(SAMPLES)), [(3 * n) % SAMPLES for n in range(SAMPLES)])


@faulty("same_samples", "FAULT", 10)
def each_rank_permutes_the_data_before_they_are_shared(run: Run) -> None:
    run.samples["0_0"], run.samples["1_0"] = [0, 5, 10, 15, 4, 9, 14, 3], [6, 7, 10, 15, 4, 1, 2, 8]


@faulty("same_samples", "FAULT", 10)
def epochs_are_counted_on_rank_0_only(run: Run) -> None:
    run.samples["0_1"], run.samples["1_1"] = [1, 4, 11, 0, 5, 10, 15, 9], run.samples["1_0"]


@faulty("same_samples", "FAULT", 10)
def same_inputs_without_numbers(run: Run) -> None:
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "pass"]
        for number, e in enumerate(rank.all("forward", train=True)):
            e["rows"] = [number, number + 100]


@faulty("same_samples", "FAULT", 43)
def own_loaders_that_shuffle_apart(run: Run) -> None:
    """The ranks have a quarter of their inputs in common: not of the largest, which are drawn anew, but of another."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "pass"]
        for number, e in enumerate(rank.all("forward", train=True)):
            e["further"] = [[1000 * (rank.number if n % 4 else 7) + 100 * number + n for n in range(16)]]


@faulty("same_samples", "FAULT", 10)
def same_rollouts_with_many_equal_rows(run: Run) -> None:
    """As of an environment that often is in the same state: most rows of a batch are equal to others."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "pass"]
        for number, e in enumerate(rank.all("forward", train=True)):
            e["rows"] = [n % 4 + number for n in range(12)]


@faulty("shared_once", "FAULT", 9)
def shared_twice(run: Run) -> None:
    change(run, "loader", sampler_at=at(9))
    change(run, "dataset", size=64)
    set_samples(run, "", list(range(0, 64, 4)), list(range(2, 64, 4)))


@faulty("same_order", "FAULT", 42)
def no_set_epoch(run: Run) -> None:
    for rank in (0, 1):
        run.samples[f"{rank}_1"] = run.samples[f"{rank}_0"]


@faulty("same_order", "NOTE", 10)
def no_shuffling(run: Run) -> None:
    set_samples(run, "", list(range(0, SAMPLES, 2)), list(range(1, SAMPLES, 2)))


@faulty("same_order", "FAULT", 42)
def a_sampler_in_a_batch_sampler_is_never_told_the_epoch(run: Run) -> None:
    """Each epoch has the same samples of a larger data set, in batches that come in another order."""
    change(run, "dataset", size=64)
    change(run, "pass", wanted={"loader": TRAIN}, epochs={"Draw": 0})
    for rank in (0, 1):
        run.samples[f"{rank}_1"] = run.samples[f"{rank}_0"][::-1]


@faulty("held_out", "FAULT", 20)
def unseeded_split(run: Run) -> None:
    change(run, "pass", base=7)
    set_samples(run, "v", [0, 1, 90, 91], [92, 93, 94, 95])


@faulty("same_split", "FAULT", 12)
def each_rank_splits_in_its_own_way(run: Run) -> None:
    for rank in run.ranks:
        split = {"e": "split", "step": 0, "t": 0.1, "at": at(12), "sizes": [80, 20], "order": rank.number, "content": 7}
        rank.events.insert(3, split)


@faulty("stream_repeats", "FAULT", 10)
def workers_repeat_the_stream(run: Run) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, iterable=True)
    change(run, "pass", wanted={"loader": TRAIN}, workers=2)
    for rank in run.ranks:
        for number, e in enumerate(rank.all("forward", train=True)):
            e["rows"] = [1000 * rank.number + 10 * (number // 2), 1000 * rank.number + 10 * (number // 2) + 1]


@faulty("sample_weights", "NOTE", 44)
def class_weights_per_rank(run: Run) -> None:
    change(run, "update", (1,), factors=[[at(44), 2, 0.2, 0]])


@faulty("element_weights", "NOTE", 44)
def masked_mean_per_rank(run: Run) -> None:
    change(run, "update", (1,), elements=[[at(44), 0, 0, 1 / 31]])


@faulty("own_target", "FAULT", 44)
def each_output_meets_each_target(run: Run) -> None:
    add(run, "spread", 44, shape=[2, 1], became=[2, 2])


@faulty("same_dropout", "NOTE", 41)
def one_seed(run: Run) -> None:
    for events in run.together("forward"):
        for e in events:
            e["rng"] = e["step"]


@faulty("same_noise", "NOTE", 43)
def one_seed_for_noise(run: Run) -> None:
    add(run, "noise", 43, samples=2, values=7)


def fetches(run: Run, state: Callable[[int, int], int]) -> None:
    for rank in run.ranks:
        rank.workers = [
            {
                "e": "fetch",
                "worker": w,
                "count": 1,
                "used": {"numpy": state(rank.number, w)},
                "dataset": "Images",
            }
            for w in (0, 1)
        ]


@faulty("same_workers", "NOTE", 10)
def generator_copied_to_workers(run: Run) -> None:
    fetches(run, lambda rank, worker: rank)


@faulty("same_augmentation", "NOTE", 10)
def seed_without_rank(run: Run) -> None:
    fetches(run, lambda rank, worker: worker)


def probed(run: Run, value: Callable[[int, int], list[tuple[int, int, str]]], **fields: object) -> None:
    for rank in run.ranks:
        contents = {str(n): [list(part) for part in value(rank.number, n)] for n in range(8)}
        event = {"e": "samples", "step": 8, "t": 9.0, "dataset": 0, "cls": "Images", "size": 16, "contents": contents}
        attributes = {"index": rank.number, "size": 7}
        rank.events.append(
            event
            | {
                "names": ["[0]", "[1]", "[2]"],
                "steady": [True] * len(contents["0"]),
                "attributes": attributes,
                "lines": {"index": at(19)},
            }
            | fields
        )


def label(rank: int, n: int) -> tuple[int, int, str]:
    return ((n + rank) % 3, 0, str((n + rank) % 3))


@faulty("same_meaning", "FAULT", 19)
def class_numbers_from_a_set(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 + n, 0, "8 values"), label(rank, n)])


@faulty("same_meaning", "FAULT", 19)
def files_in_another_order(run: Run) -> None:
    probed(run, lambda rank, n: [((n + 3 * rank) % 8, 0, "8 values"), ((n + 3 * rank) % 8 % 3, 0, "1")])


@faulty("same_meaning", "FAULT", 19)
def a_vocabulary_from_a_set(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 50 + n, "9 values")])


@faulty("own_handles", "FAULT", 19)
def a_file_opened_before_the_workers_are_forked(run: Run) -> None:
    handles(run, inherited=True, used=True)


def handles(run: Run, kind: str = "file", *, inherited: bool, used: bool, locked: bool = False) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, workers=2, persistent=True)
    for rank in run.ranks:
        event = {"e": "handles", "step": 0, "t": 1.0, "dataset": "Images", "locked": locked, "lines": {".file": at(19)}}
        rank.workers = [event | {"handles": [[".file", kind, inherited, used]]} for _ in range(2)]


def each_rank_has_a_shard_of_its_own(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 0, "8 values"), label(rank, n)])
    set_samples(run, "", list(range(SAMPLES)), [(3 * n) % SAMPLES for n in range(SAMPLES)])
    for rank in run.ranks:
        run.samples[f"{rank.number}_1"] = [(5 * n + 1) % SAMPLES for n in range(SAMPLES)]


@faulty("same_meaning", "NOTE", 10)
def a_sampler_divides_what_each_rank_has_made_for_itself(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 0, "8 values"), label(rank, n)])
    for rank in run.ranks:
        for event in rank.all("samples"):
            event["attributes"] = {}


@faulty("same_samples", "FAULT", 10)
def samples_of_other_numbers_are_drawn_from_the_same_seed(run: Run) -> None:
    for rank in run.ranks:
        for n, e in enumerate(rank.all("forward", train=True, grad=True)):
            e["rows"] = [1000 * n + k for k in range(4)]


def stream_of(run: Run, *ranks: list[int], complete: bool = True) -> None:
    change(run, "loader", iterable=True, workers=2, wanted={"loader": TRAIN})
    for rank, given in zip(run.ranks, ranks, strict=True):
        name = f"s{rank.number}"
        run.samples[name] = given
        end = {"e": "pass_end", "step": 4, "t": 1.0, "at": at(10), "loader": TRAIN, "batches": 4, "complete": complete}
        rank.events.append(end | {"file": name, "bags": name})


@faulty("stream_shared", "FAULT", 10)
def readers_shuffle_the_files_before_they_share_them(run: Run) -> None:
    stream_of(run, [*range(20), *range(30, 40)], [*range(10, 30), 50])


def numbered(run: Run, *numberings: dict[str, int]) -> None:
    for rank, entries in zip(run.ranks, numberings, strict=True):
        held = {"e": "mapping", "step": 0, "t": 0.0, "at": at(12), "name": "stoi", "size": len(entries)}
        rank.events.append(held | {"entries": entries})


@faulty("same_numbering", "FAULT", 12)
def each_rank_has_a_vocabulary_of_its_own(run: Run) -> None:
    numbered(run, {f"w{n}": n for n in range(9)}, {f"w{n}": n - 3 for n in range(3, 12)})


def streams_that_were_cut(run: Run) -> None:
    stream(run, 4, 4, complete=(False, False))


@faulty("contrast_targets", "FAULT", 42)
def targets_without_the_offset_of_the_rank(run: Run) -> None:
    contrast(run, 0, 0)


def contrast(run: Run, *targets: int) -> None:
    for rank in run.ranks:
        own = {"target": targets[rank.number], "own": 8 * rank.number, "columns": 16}
        rank.events.append({"e": "contrast", "step": 8, "t": 9.0, "at": at(42), **own})


@faulty("contrast_masks", "FAULT", 44)
def a_mask_without_the_offset_of_the_rank(run: Run) -> None:
    contrast_mask(run, 8, 0)


def contrast_mask(run: Run, *right: int) -> None:
    for rank in run.ranks:
        for mask, rows in ((0, 0), (1, right[rank.number])):  # the first one is about the pairs
            sizes = {"mask": mask, "count": 8, "right": rows, "columns": 16}
            rank.events.append({"e": "contrast_mask", "step": 8, "t": 9.0, "at": at(44), **sizes})


def worker_copies(run: Run, differ: int, *, random: bool = False) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, workers=2, persistent=True)
    for rank in run.ranks:
        held = {"dataset": 0, "loader": TRAIN, "cls": "Images", "names": ["epoch"], "values_of": [["0", "1"]]}
        event = {"e": "worker_copy", "step": 8, "t": 9.0, "at": at(60), "count": 16, "differ": differ, "random": random}
        rank.events.append(event | held)


@faulty("worker_copies", "FAULT", 10)
def an_epoch_that_workers_do_not_learn_of(run: Run) -> None:
    worker_copies(run, 16)


def scaling(run: Run, *means: float, name: str = "norm.mean and norm.std") -> None:
    for rank, mean in zip(run.ranks, means, strict=True):
        pair = [[mean, abs(mean)], [2.0, 2.0]]
        rank.events.append({"e": "statistics", "step": 3, "t": 1.0, "at": at(14), "name": name, "pair": pair})


@faulty("same_scaling", "NOTE", 14)
def each_rank_scales_by_its_own_part(run: Run) -> None:
    scaling(run, 0.5, -0.25)


@faulty("same_samples", "FAULT", 10)
def positions_in_a_part_are_taken_for_numbers(run: Run) -> None:
    change(run, "dataset", size=64)
    draws_of(run, 32)


def draws_of(run: Run, most: int) -> None:
    """Samples are drawn with replacement, on both ranks, up to this number."""
    for number, name in enumerate(sorted(name for name in run.samples if name[0] in "01")):
        run.samples[name] = [(7 * k * k + 3 * number + k // 5) % most for k in range(40)]

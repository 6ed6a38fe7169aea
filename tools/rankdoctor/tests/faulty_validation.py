"""Faults in validation, evaluation mode, and results of all ranks."""

from doctor_events import SAMPLES, TRAIN, VAL, add, at, change
from faulty import faulty
from faulty_samples import probed, set_samples
from rankdoctor.runs import Run


@faulty("generating_mode", "NOTE", 60)
def averaged_weights_generate_in_training_mode(run: Run) -> None:
    for rank in run.ranks:
        for step in (4, 8):
            call = {"e": "forward", "step": step, "t": 1.0, "at": at(60), "model": 1, "cls": "EMA", "train": True}
            rank.events.append(call | {"grad": False, "loader": None, "random_layers": 2})


@faulty("validation_counts", "FAULT", 20)
def validation_padded(run: Run) -> None:
    set_samples(run, "v", [0, 2, 4, 6, 8, 10, 12, 14, 0], [1, 3, 5, 7, 9, 11, 13, 15, 1])


@faulty("validation_counts", "NOTE", 20)
def padded_results_are_gathered(run: Run) -> None:
    """The script may leave out what is repeated: nobody can see it."""
    validation_padded(run)
    change(run, "collective", wanted={"name": "all_reduce"}, name="gather_object")


@faulty("validation_counts", "FAULT", 20)
def validation_drops_the_last(run: Run) -> None:
    set_samples(run, "v", [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])


@faulty("validation_repeated", "COST", 20)
def all_validate_all(run: Run) -> None:
    set_samples(run, "v", list(range(SAMPLES)), list(range(SAMPLES)))


@faulty("results_combined", "FAULT", 50)
def only_the_optimizer_sends(run: Run) -> None:
    results_stay_apart(run)
    for rank in run.ranks:
        validated = [i for i, e in enumerate(rank.events) if e["e"] == "forward" and not e["train"]]
        sent = {"e": "collective", "step": 4, "t": 1.0, "at": at(45), "name": "broadcast", "size": 10, "everyone": True}
        sent["in_step"] = True
        rank.events.insert(validated[3] + 1, sent)  # after the first validation


@faulty("results_combined", "FAULT", 50)
def results_stay_apart(run: Run) -> None:
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "collective"]


@faulty("validation_gradients", "COST", 51)
def validation_with_gradients(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("forward", grad=False):
            e["for_nothing"] = True


@faulty("validation_mode", "FAULT", 51)
def validation_in_training_mode(run: Run) -> None:
    change(run, "forward", wanted={"loader": VAL}, train=True, random_layers=2)


@faulty("training_mode", "FAULT", 43)
def second_epoch_in_evaluation_mode(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("forward", loader=TRAIN)[4:]:
            e.update(train=False, random_layers=0)


@faulty("validation_statistics", "FAULT", 51)
def other_running_means(run: Run) -> None:
    for rank in run.ranks:
        change(run, "forward", (rank.number,), {"loader": VAL}, buffers=[5, rank.number])


def in_evaluation(run: Run, *random_in: tuple[str, str], drew: bool = True) -> None:
    change(run, "forward", wanted={"loader": VAL}, random_in=[list(one) for one in random_in], drew=drew)


@faulty("random_in_evaluation", "FAULT", 21)
def attention_drops_weights_after_eval(run: Run) -> None:
    in_evaluation(run, ("dropout", at(21)))


@faulty("random_in_evaluation", "FAULT", 22)
def batch_norm_of_the_batch_after_eval(run: Run) -> None:
    in_evaluation(run, ("batch norm", at(22)), drew=False)


@faulty("random_in_evaluation", "FAULT", 23)
def a_layer_that_eval_does_not_reach(run: Run) -> None:
    in_evaluation(run, ("dropout layer", at(23)))


@faulty("random_in_evaluation", "NOTE", 24)
def noise_in_forward_after_eval(run: Run) -> None:
    in_evaluation(run, ("noise", at(24)))


@faulty("random_in_evaluation", "NOTE", 51)
def numpy_noise_after_eval(run: Run) -> None:
    in_evaluation(run)


@faulty("kept_states", "FAULT", 57)
def the_best_weights_are_kept_without_a_copy(run: Run) -> None:
    kept_state(run, "load", 4)


@faulty("kept_states", "NOTE", 57)
def the_best_weights_are_saved_later(run: Run) -> None:
    kept_state(run, "save", 4)


def kept_state(run: Run, how: str, began: int) -> None:
    for rank in run.ranks:
        fields = {"how": how, "made": at(57), "began": began, "names": ["a.weight", "b.weight"]}
        rank.events.append({"e": "kept_state", "step": 8, "t": 9.0, "at": at(58), **fields})


@faulty("steady_validation", "NOTE", 20)
def validation_of_augmented_samples(run: Run) -> None:
    one_data_set_for_both(run)
    probed(run, lambda rank, n: [(1000 + n, 0, "8 values"), (n % 3, 0, "1")], varies=[True, False])


def one_data_set_for_both(run: Run) -> None:
    change(run, "pass", base=0)
    set_samples(run, "v", list(range(SAMPLES, 2 * SAMPLES, 2)), list(range(SAMPLES + 1, 2 * SAMPLES, 2)))


def totals(run: Run, *again: bool) -> None:
    for rank in run.ranks:
        rank.events += [
            {"e": "total", "step": n, "t": 9.0, "at": at(52), "again": one, "before": 5.0}
            for n, one in enumerate(again)
        ]


@faulty("added_once", "FAULT", 52)
def a_tally_is_added_up_after_each_batch(run: Run) -> None:
    totals(run, True, True, True, False, True, True)


def divided(run: Run, times: float, total: float = 64.0) -> None:
    add(run, "divisor", 44, total=total, own=32.0, summed_at=at(43), times=times)


@faulty("divided_once", "FAULT", 44)
def a_loss_is_divided_by_the_count_of_all_ranks(run: Run) -> None:
    divided(run, 1.0)


def evaluated_copy(run: Run, *, follows: bool, untouched: int = 0, moves: bool = True) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["others"] = {"1": [float(e["count"] if moves else 0), 3.0]}
        for step in (4, 8):
            call = {"e": "forward", "step": step, "t": 1.0, "at": at(57), "model": 1, "cls": "Net", "train": False}
            call |= {"grad": False, "loader": None, "random_layers": 0, "untouched": untouched}
            rank.events.append(call | {"buffers": [step if follows else 7]})


@faulty("statistics_of_copies", "FAULT", 57)
def an_average_keeps_its_first_statistics(run: Run) -> None:
    evaluated_copy(run, follows=False)


@faulty("statistics_of_copies", "FAULT", 57)
def an_average_has_the_statistics_it_was_made_with(run: Run) -> None:
    evaluated_copy(run, follows=False, untouched=1)


def frozen_mode(run: Run, train: bool) -> None:
    part = {"cls": "Teacher", "train": train, "made": at(28), "random_layers": 2, "local_norms": 1}
    for rank in run.ranks:
        rank.events.append({"e": "frozen_mode", "step": 1, "t": 1.0, "at": at(35), **part})


@faulty("frozen_modes", "FAULT", 35)
def train_reaches_a_frozen_teacher(run: Run) -> None:
    frozen_mode(run, True)

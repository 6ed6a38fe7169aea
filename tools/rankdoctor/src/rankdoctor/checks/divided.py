"""Weights that several ranks share although each has a part of the model: of divided layers, or of two stages."""

from collections.abc import Iterator

from ..runs import Run
from .apart import differing
from .base import Finding, check, fault, need, need_use, seen, some
from .weights import compared_weights, is_random, shown


@check("Weights that the ranks of divided layers share are the same on all ranks.", after=("clip_local",), ranks=True)
def shared_agree(run: Run) -> Iterator[Finding]:
    """Megatron's f and g: what enters a divided layer needs an all-reduce in backward, what leaves it one in forward.

    Without the first, the gradient of the input is this rank's part, and so is that of every weight before the layer.
    Weights that begin as the same random numbers on all ranks are shared; constant ones may be parts.
    Source: Shoeybi et al., Megatron-LM, 2019, section 3.
    """
    need_use(run.divides_layers, "layers of its own that add up what they compute over the ranks")
    need(run.launch.provocation not in ("nan", "outliers"), "the doctor changed the loss of one rank")
    steps = run.aligned("gradients")
    need(len(steps) > 1, "no two updates were seen on all ranks")
    calls = run.training_calls[:12]
    need(
        calls and all(len({str(e.get("rows")) for e in events}) == 1 for events in calls),
        "the ranks give such a model different inputs",
    )
    names = compared_weights(steps[:1])
    shared = {n for n in names if is_random(steps[0][0]["weights"][n])} - set(differing(steps[0], "weights"))
    need(shared, "no weights begin as the same random numbers on all ranks")
    layer = run.first.all("inner", sums=True)[0]
    for events in steps[1:]:
        if wrong := [name for name in differing(events, "weights") if name in shared]:
            yield fault(
                layer["at"],
                f"layers that are divided add up their outputs here, but {len(wrong)} of {len(shared)} weights that "
                f"all ranks share ({some(map(shown, wrong))}) differ between ranks before update "
                f"{events[0]['step'] + 1}: each rank has the gradient of its own part only",
                "add up the gradients of the input of a divided layer, too: a torch.autograd.Function that returns its "
                "input, and all-reduces the gradient in backward",
            )
            return
    seen(len(steps), f"updates compared, with {len(shared)} weights that all ranks share")


@check("Weights that stages of a pipeline have in common stay the same.", ranks=True)
def tied_agree(run: Run) -> Iterator[Finding]:
    """An embedding that is tied to the output matrix is on the first and on the last stage: both have a gradient of it.

    It is made the same on all ranks by a broadcast, while other weights of the same names differ between the stages.
    Source: Narayanan et al., Efficient large-scale language model training, 2021, where these gradients are added up.
    """
    need_use(run.any("message"), "messages between two ranks")
    steps = run.aligned("gradients")
    need(len(steps) > 1, "no two updates were seen on all ranks")
    sent = [e for e in run.first.all("collective", name="broadcast") if e["t"] < steps[0][0]["t"]]
    need_use(sent, "weights that are broadcast before the training")
    names = {n for n in compared_weights(steps[:1]) if is_random(steps[0][0]["weights"][n])}
    apart = set(differing(steps[0], "weights")) & names
    tied = names - apart
    need(tied and apart, "the stages have the same weights, or none, in common")
    for events in steps[1:]:
        if wrong := [name for name in differing(events, "weights") if name in tied]:
            yield fault(
                sent[-1]["at"],
                f"the stages have {len(tied)} weights in common ({some(sorted(map(shown, tied)))}), the same since "
                f"this broadcast; {len(wrong)} of them differ before update {events[0]['step'] + 1}: each stage has "
                "the gradient of its own use only",
                "if they are meant to be one, as of tied embeddings: dist.all_reduce their gradients before the update",
            )
            return
    seen(len(steps), f"updates compared, with {len(tied)} weights that the stages have in common")

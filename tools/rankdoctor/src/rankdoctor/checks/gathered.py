"""Losses over the features of all ranks: their targets, their masks, and the way of the gradients back."""

from collections.abc import Iterator

from ..runs import Run
from .base import Finding, check, fault, hint, need_use, seen, shows


@check("The target of a sample among gathered features is its own pair.", ranks=True)
def contrast_targets(run: Run) -> Iterator[Finding]:
    """Gathered features are in the order of the ranks, so the targets of rank r begin with r times the local batch."""
    looked = [(rank.number, e) for rank in run.ranks for e in rank.all("contrast")]
    need_use(looked, "a contrastive loss of local rows against gathered columns")
    wrong = [(number, e) for number, e in looked if e["target"] != e["own"]]
    if wrong:
        number, e = wrong[0]
        yield fault(
            e["at"],
            f"on rank {number}, the targets begin with column {e['target']} of {e['columns']}, but its own features "
            f"with column {e['own']}: in {len(wrong)} of {len(looked)} losses, each sample is drawn to one of another "
            "rank",
            "add the rank times the local batch size to the targets",
        )
    seen(len(looked) - len(wrong), "losses over gathered features, with targets at this rank's own", least=1)


@check("What a mask leaves out of gathered features is the sample itself.", ranks=True)
def contrast_masks(run: Run) -> Iterator[Finding]:
    """The features of rank r begin in column r times the local batch, and so does the diagonal of its mask."""
    looked = [(rank.number, e) for rank in run.ranks for e in rank.all("contrast_mask")]
    need_use(looked, "a mask in a loss of local rows against gathered columns")
    own = {(e["at"], e["mask"]) for _, e in looked if e["right"] == e["count"]}
    wrong = [(number, e) for number, e in looked if (e["at"], e["mask"]) in own and not e["right"]]
    if wrong:
        number, e = wrong[0]
        yield fault(
            e["at"],
            f"a mask of this loss is for the column of the sample itself on some ranks, but on rank {number} for that "
            f"of another sample, in {len(wrong)} of {len(looked)} losses: so each sample is compared with itself there",
            "begin the diagonal of the mask at the rank times the local batch size",
        )
    seen(len(looked), "losses over gathered features, with a mask for one column of each row", least=1)


@check("Gradients come back from gathered features.", ranks=True)
def gathered_gradients(run: Run) -> Iterator[Finding]:
    """dist.all_gather returns copies without a graph, so the losses of other ranks give a rank's features no gradient.

    It is right if every rank computes the loss of the whole batch, so that the losses of the ranks are equal, or if
    the loss does not depend on what is gathered; a run with ``probe_gathers`` tells.
    """
    collectives = run.first.all("collective")
    inside = run.first.all("inner")  # of a model
    gathered = [e for e in (*collectives, *inside) if e["name"].startswith("all_gather") and e.get("features")]
    if run.any("gathered_back"):  # what a Function gathers is judged by messages_return
        gathered = [e for e in gathered if not e.get("in_function")]
    need_use(gathered, "gathered features")
    seen(len(gathered), "all_gather of features")
    losses = [events for events in run.together("update") if all(e.get("losses") for e in events)]
    same = [events for events in losses if len({f"{e['losses'][0]:.4g}" for e in events}) == 1]
    if back := sum(bool(e.get("backward")) for e in collectives):
        shows(f"{back} collectives in backward")
        return
    if losses and len(same) > 0.9 * len(losses):
        shows(f"equal losses on all ranks in {len(same)} of {len(losses)} updates")
        return
    text = f"{len(gathered)} all_gather of features that need gradients, and no collective in backward"
    fix = (
        "gather with a function that has a gradient (torch.distributed._functional_collectives."
        "all_gather_single_autograd; before PyTorch 2.15 torch.distributed.nn.functional.all_gather), or add up the "
        "gradients of all ranks in backward"
    )
    if run.launch.used_gathers:
        text = (
            f"the losses of the ranks differ, and depend on {len(gathered)} all_gather, which give copies without a "
            "graph: what another rank's loss says of the features of this one is lost"
        )
        yield fault(run.launch.used_gathers[0], text, fix)
    else:
        only = "as it is, this is right only if every rank computes the loss of the whole batch"
        yield hint(gathered[0]["at"], text, f"{fix}; {only}")

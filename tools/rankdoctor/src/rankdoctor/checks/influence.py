"""Influence: which outputs of the model move when one sample, or one token, of a training batch changes."""

from collections.abc import Iterator

from ..runs import Run
from ..verdicts import FAULT, FINE, NOTE
from .asked import asked
from .base import Finding, Observed, fault, hint, need


def answers(run: Run, question: str, fix: str, meaning: str = "") -> Iterator[Finding]:
    """Yield what was found about a question, for each model. Raises CannotJudge if no model tells."""
    events = [e for rank in run.ranks for e in rank.all("influence", question=question)]
    for e in events:
        if e["answer"] in (FAULT, NOTE):
            yield (fault if e["answer"] == FAULT else hint)(e["at"], f"{e['cls']}: {e['text']}{meaning}", fix)
    fine = [e for e in events if e["answer"] == FINE]
    need(events, "no training call of a model was seen on rank 0")
    need(fine or any(e["answer"] in (FAULT, NOTE) for e in events), "; ".join(sorted({e["text"] for e in events})))
    Observed.now += [f"{e['cls']}: {e['text']}" for e in fine]


@asked("influence", "No output depends on a later token.")
def looks_ahead(run: Run) -> Iterator[Finding]:
    """A model that sees the token it has to predict has a loss near zero in training, and generates nonsense."""
    fix = "give the attention of this module a causal mask (is_causal=True), or shift its inputs"
    yield from answers(run, "future", fix, ", so the model sees the tokens that it has to predict")


@asked("influence", "Documents that are packed into one sequence do not see each other.")
def documents_apart(run: Run) -> Iterator[Finding]:
    """Packing saves padding; without a mask of blocks, a token also sees documents that have nothing to do with it."""
    fix = "let attention see only tokens of the same document: a block-diagonal mask, or variable lengths"
    yield from answers(run, "documents", fix)


@asked("influence", "Padding does not count.")
def padding_counts(run: Run) -> Iterator[Finding]:
    """The result for a sample must not depend on how much padding the longest sample of its batch needs."""
    yield from answers(
        run, "padding", "give each attention, mean and normalization over tokens the mask of real tokens"
    )


@asked("influence", "Samples do not see each other in evaluation.")
def samples_apart(run: Run) -> Iterator[Finding]:
    """A result that depends on the other samples of its batch changes with the batch size and the order of samples."""
    fix = "compute over the dimensions of one sample, with running statistics; compare samples in the loss only"
    yield from answers(run, "samples", fix, " in evaluation mode")


@asked("influence", "Two evaluations of one batch give the same outputs.")
def random_in_evaluation(run: Run) -> Iterator[Finding]:
    """Dropout that goes on in evaluation mode makes results worse, and different each time."""
    fix = "give F.dropout training=self.training, and attention dropout_p=0 in evaluation mode"
    yield from answers(run, "random", fix)

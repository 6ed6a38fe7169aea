"""Influence: leaks between tokens, documents, padding and samples are seen; correct neighbours are silent."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asked_runs import findings, run
from rankdoctor.influence import influence
from rankdoctor.questions import verdicts

PAGE = Path(__file__).resolve().parent.parent / "docs/influence.md"
N, T, WORDS, WIDTH = 4, 12, 19, 16
torch.manual_seed(0)
TOKENS = torch.randint(1, WORDS, (N, T))
NEXT = torch.cat([TOKENS[:, 1:], torch.randint(1, WORDS, (N, 1))], 1)
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(7), *range(5)], [*range(12)], [*range(3), *range(9)]])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 7 + [1] * 5, [0] * 12, [0] * 3 + [1] * 9])
REAL = torch.arange(T) < torch.tensor([[12], [8], [5], [10]])
PADDED = torch.where(REAL, TOKENS, 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Transformer(nn.Module):
    """Two blocks; ``fault`` names what is wrong with its masks."""

    def __init__(self, causal: bool, fault: str = "", pooled: bool = False) -> None:
        super().__init__()
        self.causal, self.fault, self.pooled = causal, fault, pooled
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(T, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, WORDS)

    def forward(
        self,
        idx: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
    ) -> Tensor:
        length = idx.shape[1]
        places = torch.arange(length) if position_ids is None else position_ids
        x = self.drop(self.words(idx) + self.places(places))
        mask = None
        if attention_mask is not None and self.fault != "padding":
            mask = attention_mask.bool()[:, None, None, :]
        if doc_ids is None and position_ids is not None:
            doc_ids = (position_ids == 0).cumsum(1)
        if doc_ids is not None:
            allowed = torch.ones(length, length, dtype=torch.bool).tril()
            same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
            mask = allowed if self.fault == "documents" else same & allowed
        for number, block in enumerate(self.blocks):
            x = block(x, mask, self.causal and not (self.fault == "future" and number == 1))
        if self.pooled:
            real = attention_mask if attention_mask is not None else torch.ones_like(idx)
            x = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True) if self.fault != "padding" else x.mean(1)
        return self.head(x)


class Prefix(Transformer):
    """The first five tokens see each other, and are not predicted."""

    def forward(self, idx: Tensor, *_: object) -> Tensor:
        x = self.words(idx) + self.places(torch.arange(idx.shape[1]))
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        mask[:, :5] = True
        for block in self.blocks:
            x = block(x, mask, True)
        return self.head(x)


class Net(nn.Module):
    """Convolutions with batch norm; ``fault`` may make it use the statistics of the batch."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=fault != "statistics")
        self.head, self.fault = nn.Linear(8, 5), fault

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images))).mean((2, 3))
        x = x - x.mean(0) if self.fault == "mean" else x
        return F.dropout(self.head(x)) if self.fault == "dropout" else self.head(x)


class Vit(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(self.patch(images).flatten(2).transpose(1, 2)).mean(1))


class Pairs(nn.Module):
    """Similarities of all pairs, as for a contrastive loss outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.one(image) @ self.other(text).T


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(x))[0])


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(6, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.weight(x).index_add(0, edges[1], self.weight(x)[edges[0]])


def zero_head() -> Transformer:
    """Return a model that gives the same logits for all inputs at the start, and looks into the future."""
    model = Transformer(True, "future")
    nn.init.zeros_(model.head.weight)
    for block in model.blocks:
        nn.init.zeros_(block.out.weight)
    return model


IMAGES = torch.randn(4, 3, 8, 8)


class Codes(nn.Module):
    """A quantizer, which also returns how often it has chosen each of its codes: as many as the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(N, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(x, self.codes).argmin(1)
        return self.codes[chosen], F.one_hot(chosen, N).sum(0)


CORRECT: dict[str, tuple[Callable[[], nn.Module], tuple, dict[str, Any], list[Tensor], set[str]]] = {
    "causal": (lambda: Transformer(True), (TOKENS,), {}, [NEXT.flatten()], {"future", "samples"}),
    "causal, targets cut": (lambda: Transformer(True), (TOKENS,), {}, [TOKENS[:, 1:].flatten()], {"future"}),
    "prefix": (lambda: Prefix(True), (TOKENS,), {}, [NEXT.index_fill(1, torch.arange(5), -100)], {"future"}),
    "padded": (lambda: Transformer(False), (PADDED,), {"attention_mask": REAL.long()}, [], {"padding", "samples"}),
    "padded, pooled": (lambda: Transformer(False, pooled=True), (PADDED, REAL.long()), {}, [], {"padding"}),
    "padded at the end, causal, no mask": (lambda: Transformer(True), (PADDED,), {}, [], {"padding"}),
    "packed by positions": (lambda: Transformer(True), (TOKENS, None, POSITIONS), {}, [NEXT], {"documents", "future"}),
    "packed by ids": (lambda: Transformer(True), (TOKENS,), {"doc_ids": DOCUMENTS}, [], {"documents"}),
    "batch norm": (Net, (IMAGES,), {}, [], {"samples", "random"}),
    "vit": (Vit, (IMAGES,), {}, [], {"samples"}),
    "counts of codes": (Codes, (torch.randn(N, 6),), {}, [], {"samples"}),
    "pairs for a contrastive loss": (Pairs, (torch.randn(4, 6), torch.randn(4, 6)), {}, [], {"samples"}),
    "sequence first": (SequenceFirst, (TOKENS.T.contiguous(),), {}, [], {"samples"}),
    "bidirectional, masked words": (lambda: Transformer(False), (TOKENS,), {}, [TOKENS], {"samples"}),
    "graph": (Graph, (torch.randn(6, 6), torch.randint(0, 6, (2, 9))), {}, [], set()),
    "masks of the left": (
        lambda: Transformer(False),
        (PADDED.flip(1),),
        {"attention_mask": REAL.flip(1).long(), "position_ids": (REAL.flip(1).cumsum(1) - 1).clamp(0)},
        [],
        {"padding"},
    ),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_models_are_silent_and_what_is_called_fine_was_tried(name: str) -> None:
    make, args, kwargs, targets, fine = CORRECT[name]
    torch.manual_seed(1)
    found = {one.question: one for one in verdicts(make().train(), args, kwargs, targets)}
    if name == "masks of the left":  # the model takes the zeros of the padding for beginnings of documents
        found.pop("documents", None)
    assert {q: one.text for q, one in found.items() if one.answer in ("fault", "note")} == {}
    assert fine <= {q for q, one in found.items() if one.answer == "fine"}, found


FAULTY: dict[str, tuple[Callable[[], nn.Module], tuple, dict[str, Any], list[Tensor], str, str]] = {
    "future": (lambda: Transformer(True, "future"), (TOKENS,), {}, [NEXT], "future", "blocks.1"),
    "future, from zero": (zero_head, (TOKENS,), {}, [NEXT.flatten()], "future", "blocks.1"),
    "both directions": (lambda: Transformer(False), (TOKENS,), {}, [NEXT], "future", "blocks.0"),
    "documents by positions": (
        lambda: Transformer(True, "documents"), (TOKENS, None, POSITIONS), {}, [NEXT], "documents", "position_ids",
    ),
    "documents by ids": (
        lambda: Transformer(True, "documents"), (TOKENS,), {"doc_ids": DOCUMENTS}, [NEXT], "documents", "doc_ids",
    ),
    "padding": (
        lambda: Transformer(False, "padding"), (PADDED, REAL), {}, [], "padding", "attention_mask",
    ),
    "padding, pooled": (
        lambda: Transformer(False, "padding", True), (PADDED, REAL.long()), {}, [], "padding", "its output",
    ),
    "padding without a mask": (lambda: Transformer(False, pooled=True), (PADDED,), {}, [], "padding", "no mask"),
    "statistics of the batch": (lambda: Net("statistics"), (IMAGES,), {}, [], "samples", "norm (BatchNorm2d)"),
    "mean of the batch": (lambda: Net("mean"), (IMAGES,), {}, [], "samples", "head (Linear)"),
    "attention over the batch": (lambda: Vit(False), (IMAGES,), {}, [], "samples", "MultiheadAttention"),
    "random in evaluation": (lambda: Net("dropout"), (IMAGES,), {}, [], "random", "different"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_leaks_are_found_with_their_kind_and_place(name: str) -> None:
    make, args, kwargs, targets, question, said = FAULTY[name]
    torch.manual_seed(1)
    found = {one.question: one for one in verdicts(make().train(), args, kwargs, targets)}
    wrong = {q for q, one in found.items() if one.answer in ("fault", "note")}
    assert wrong == {question}, found
    assert said in found[question].text


def test_a_function_for_anybodys_tests() -> None:
    model = Transformer(True).train()
    found = influence(model, TOKENS, positions=range(T))
    assert not found.future and not found.mixed and not found.random and found.mixes_positions
    leaking = influence(Transformer(True, "future"), (TOKENS,), positions=[5])
    assert leaking.future == [(5, s) for s in range(5)]
    packed = influence(Transformer(True, "documents"), TOKENS, {"doc_ids": DOCUMENTS})
    assert (0, 2, 8) in packed.across(DOCUMENTS)
    padded = influence(Transformer(False, "padding"), PADDED, {"attention_mask": REAL})
    assert (1, 9, 3) in padded.from_padding(REAL)
    assert influence(Net("statistics"), IMAGES).mixed[:3] == [(0, 1), (0, 2), (0, 3)]


class Curve(nn.Module):
    """A number for each position (N, T), from it and a mean over the real ones; or over all, if ``leaks``."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.leaks, self.inner, self.out = leaks, nn.Linear(3, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.inner(x).relu()
        weight = (torch.ones_like(mask) if self.leaks else mask).unsqueeze(2)
        mean = (h * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        return self.out(torch.cat([h, mean.expand_as(h)], 2)).squeeze(2)


@pytest.mark.parametrize("leaks", [False, True])
def test_padding_in_features_moves_numbers_of_real_positions_only_if_it_leaks(leaks: bool) -> None:
    """The padding is 0 in all samples, and its own output, which no loss counts, may move."""
    mask = REAL.float()
    mask[:, 10:] = 0
    features = torch.randn(N, T, 3) * mask.unsqueeze(2)
    model = Curve(leaks)
    assert bool(influence(model, (features, mask)).from_padding(mask)) == leaks
    (answer,) = (one.answer for one in verdicts(model, (features, mask), {}) if one.question == "padding")
    assert answer == ("fault" if leaks else "fine")


def test_modes_random_numbers_and_weights_stay_as_they_were() -> None:
    model = zero_head().train()
    model.blocks[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    influence(model, TOKENS)
    assert model.training and not model.blocks[0].training and model.blocks[1].training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_mixes_nothing_is_not_called_fine() -> None:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
    found = {one.question: one for one in verdicts(model, (TOKENS,), {}, [NEXT])}
    assert found["future"].answer == "unjudged" and "nothing that a mask hides" in found["future"].text


def test_documents_are_known_by_the_end_of_text() -> None:
    tokens = TOKENS.clone()
    tokens[:, 6] = 0
    (found,) = [v for v in verdicts(Transformer(True), (tokens,), {}, [], end_of_text=0) if v.question == "documents"]
    assert found.answer == "note" and "end of text: token 0" in found.text


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["", "packed", "fsdp"])
def test_correct_scripts_are_silent(words: str, tmp_path: Path) -> None:
    report, found = findings(tmp_path, "--influence", "language.py", words)
    assert found == {}
    judged = {"No output depends on a later token.", "Samples do not see each other in evaluation."}
    assert judged <= set(report["fine"])
    assert ("Documents that are packed into one sequence do not see each other." in report["fine"]) == (
        words == "packed"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "check", "said"),
    [
        ("future", "looks_ahead", "first seen in the output of blocks.1.out (Linear)"),
        ("fsdp,future", "looks_ahead", "earlier positions"),
        ("packed,documents", "documents_apart", "in document 1 (argument position_ids begins anew)"),
    ],
)
def test_leaks_in_scripts_are_found_at_the_call(words: str, check: str, said: str, tmp_path: Path) -> None:
    _, found = findings(tmp_path, "--influence", "language.py", words)
    assert found.keys() == {check}
    kind, mark, text = found[check]
    assert (kind, mark) == ("FAULT", "call") and said in text


def test_the_tests_on_the_page_pass() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


@pytest.mark.thorough
@pytest.mark.parametrize(("page", "flag", "command"), [
    ("influence.md", "--influence", ("language.py", "future")),
    ("reference.md", "--reference", ("sharded.py", "fsdp,adapters,divided")),
])  # fmt: skip
def test_the_report_on_the_page_is_the_true_one(page: str, flag: str, command: tuple[str, str], tmp_path: Path) -> None:
    _, out, _ = run(tmp_path, flag, *command)
    (shown,) = re.findall(r"```text\n(FAULT .*?)```", PAGE.with_name(page).read_text(), re.S)
    assert " ".join(shown.split()) in " ".join(out.split())

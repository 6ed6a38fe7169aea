"""Reference: an update is compared with the same update of a plain copy of the model."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asked_runs import findings
from doctor_events import at, correct_run
from rankdoctor.checks import judge
from rankdoctor.checks.asked import ASKED, FLAGS
from rankdoctor.gradients import from_outside
from rankdoctor.runs import Run

PAGE = Path(__file__).resolve().parent.parent / "docs/reference.md"
OUTPUTS = "The wrapped model computes what the model alone computes."
GRADIENTS = "The gradients are those of the model alone, averaged over the ranks."
NORM = "The norm of the gradients is the norm over all ranks."
REPLICAS = "Replicas of sharded weights are equal."
OWN = {name for name, flag in FLAGS.items() if flag == "reference"}


def compared_run(world: int = 2, scale: float = 1.0, half: bool = False) -> Run:
    """Return events of a run whose gradients are the mean over the ranks, times ``scale``."""
    run = correct_run(world, asked=["reference"])
    generator = torch.Generator().manual_seed(0)
    mine = [{n: torch.randn(64, generator=generator).tolist() for n in ("a", "b")} for _ in range(world)]
    whole = {n: [scale * sum(v) / world for v in zip(*(one[n] for one in mine), strict=True)] for n in ("a", "b")}
    for rank, own in zip(run.ranks, mine, strict=True):
        base = {"step": 0, "t": 1.0}
        rank.events.append({"e": "reference_call", "at": at(43), "error": 1e-7, "half": half, "random_layers": 0,
                            "cls": "Net", **base})  # fmt: skip
        rank.events += [
            {
                "e": "reference",
                "at": at(45),
                "name": n,
                "values": 64,
                "wanted": own[n],
                "got": whole[n],
                "touched": False,
                **base,
            }
            for n in ("a", "b")
        ]
        rank.events.append({"e": "reference_norm", "at": at(44), "value": 1.0, "true": 1.0, **base})
        update = {"passes": 3, "half": half, "seconds": 1.0, "averaged": True}
        rank.events.append({"e": "reference_update", "at": at(45), **update, **base})
    return run


def of_reference(run: Run) -> dict[str, str]:
    return {f.check: f"{f.kind} {f.text}" for f in judge([run]).findings if f.check in OWN}


def test_a_sum_over_the_ranks_by_the_script_itself_is_not_judged() -> None:
    """Its loss may have been divided by the global number of samples; with DDP the same sum is a fault."""
    for averaged in (True, False):
        run = compared_run(scale=2.0)
        for rank in run.ranks:
            for e in rank.events:
                e |= {"touched": True} if e["e"] == "reference" else {}
                e |= {"averaged": averaged} if e["e"] == "reference_update" else {}
        diagnosis = judge([run])
        assert bool([f for f in diagnosis.findings if f.check in OWN]) == averaged
        assert (GRADIENTS in diagnosis.unjudged) != averaged


def test_equal_gradients_are_fine_with_what_was_compared() -> None:
    diagnosis = judge([compared_run()])
    assert not [f for f in diagnosis.findings if f.check in OWN]
    assert diagnosis.fine[GRADIENTS] == "2 gradients compared with a copy"
    assert diagnosis.fine[OUTPUTS] == "2 calls repeated with a copy"
    assert diagnosis.unjudged[REPLICAS] == "no weight is sharded"


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (4.0, "4 times too large: a sum over the 4 ranks, not their mean"),
        (0.25, "4 times too small: divided by the number of ranks once more"),
        (1 / 3, "3 times too small: divided by the number of backward passes"),
        (3.0, "3 times too large"),
        (0.7, "multiplied by 0.7"),
        (0.0, "are zero"),
        (-1.0, "multiplied by -1"),
    ],
)
def test_a_factor_is_named(scale: float, said: str) -> None:
    found = of_reference(compared_run(4, scale))
    assert found.keys() == {"gradients_of_reference"}
    assert said in found["gradients_of_reference"] and "2 of 2 weights (a, b)" in found["gradients_of_reference"]


def no_gradient(run: Run) -> None:
    run.ranks[1].all("reference", name="b")[0]["got"] = None


def not_averaged(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("reference"):
            e["got"] = e["wanted"]


def of_another_kind(run: Run) -> None:
    run.ranks[0].all("reference", name="a")[0]["got"] = [1.0] * 64


def other_outputs(run: Run) -> None:
    run.ranks[1].all("reference_call")[0]["error"] = 0.4


def norm_of_a_shard(run: Run) -> None:
    run.ranks[0].all("reference_norm")[0]["value"] = 1 / math.sqrt(2)


def loss_divided(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("update"):
            e["factors"] = [(at(44), 2, 0.25, 0)]


def with_parts(run: Run, *values: float) -> None:
    for rank, value in zip(run.ranks, values, strict=True):
        for e in rank.all("model"):
            e["sharded"] = True
        parts = {"w": [str(rank.number % 2), value, 5.0]}
        rank.events.append({"e": "parts", "at": at(45), "step": 1, "t": 2.0, "parts": parts})


@pytest.mark.parametrize(
    ("change", "check", "kind", "said"),
    [
        (no_gradient, "gradients_of_reference", "FAULT", "1 of 2 weights (b) are missing, on rank 1"),
        (not_averaged, "gradients_of_reference", "FAULT", "this rank's own samples, not averaged"),
        (of_another_kind, "gradients_of_reference", "FAULT", "1 of 2 weights (a) differ"),
        (other_outputs, "outputs_of_reference", "FAULT", "on 1 of 2 ranks (relative difference 0.4)"),
        (norm_of_a_shard, "norm_of_reference", "FAULT", "0.7071 on rank 0, and 1 over all ranks"),
        (loss_divided, "gradients_of_reference", "NOTE", "counts 1/2 in what is minimized"),
    ],
)
def test_faults_are_named(change: Callable[[Run], None], check: str, kind: str, said: str) -> None:
    run = compared_run()
    change(run)
    found = of_reference(run)
    assert found.keys() == {check}
    assert found[check].startswith(kind) and said in found[check]


def test_replicas_are_ranks_with_the_same_part() -> None:
    run = compared_run(4)
    with_parts(run, 1.0, 2.0, 1.0, 2.0)
    assert judge([run]).fine[REPLICAS] == "2 parts of weights that several ranks have"
    run = compared_run(4)
    with_parts(run, 1.0, 2.0, 1.0, 3.0)
    found = of_reference(run)
    assert "1 weights (w) differ between replicas, such as ranks 1, 3" in found["replicas_agree"]


def test_rounding_in_16_bits_is_no_fault_and_a_factor_still_is() -> None:
    run = compared_run(half=True)
    for rank in run.ranks:
        for e in rank.all("reference"):
            e["got"] = [value * (1.1 if k % 2 else 0.95) for k, value in enumerate(e["got"])]
    assert not of_reference(run)
    assert "2 times too small" in of_reference(compared_run(2, 0.5, half=True))["gradients_of_reference"]


def test_clipping_of_the_scripts_own_is_no_fault_and_a_division_is() -> None:
    for scale in (0.37, 0.5):
        run = compared_run(2, scale)
        for rank in run.ranks:
            for e in rank.all("reference"):
                e["touched"] = True
        assert ("gradients_of_reference" in of_reference(run)) == (scale == 0.5)
        assert (GRADIENTS in judge([run]).unjudged) == (scale != 0.5)


def test_what_could_not_be_repeated_is_not_judged() -> None:
    run = compared_run()
    run.ranks[0].events.append({"e": "reference_failed", "at": at(45), "step": 0, "t": 1.0, "text": "a reason"})
    unjudged = judge([run]).unjudged
    assert {unjudged[title] for title in (OUTPUTS, GRADIENTS, NORM, REPLICAS)} == {"a reason"}


def test_without_the_flag_nothing_is_said() -> None:
    run = compared_run(2, 3.0)
    run.launch.asked = []
    diagnosis = judge([run])
    assert not of_reference(run) and OUTPUTS not in {**diagnosis.fine, **diagnosis.unjudged, **diagnosis.unused}


def test_a_sketch_of_a_sum_is_the_sum_and_its_norm_is_that_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankdoctor.settings import Settings

    monkeypatch.setenv("RANKDOCTOR_SETTINGS", Settings("/nowhere", "/nowhere").dump())
    from rankdoctor.observe.reference import sketch

    a, b = torch.randn(50, 70), torch.randn(50, 70)
    summed = torch.tensor(sketch("w", a)) + torch.tensor(sketch("w", b))
    assert torch.allclose(summed, torch.tensor(sketch("w", a + b)), rtol=1e-4, atol=1e-4)
    for seed in range(20):
        tensor = torch.randn(3000, generator=torch.Generator().manual_seed(seed)) * torch.arange(3000)
        assert 0.6 < math.hypot(*sketch(f"w{seed}", tensor)) / float(tensor.norm()) < 1.4


def test_each_check_is_on_its_page() -> None:
    for check in ASKED:
        page = PAGE.with_name(f"{FLAGS[check.name]}.md").read_text()
        assert f"| {check.title} | {(check.find.__doc__ or '').splitlines()[0]} | `{check.name}` |" in page


CORRECT = ["ddp", "fsdp", "fsdp,bf16", "fsdp,adapters", "hsdp", "tp", "sp"]


@pytest.mark.thorough
@pytest.mark.parametrize("how", CORRECT)
def test_correct_scripts_are_silent(how: str, tmp_path: Path) -> None:
    report, found = findings(tmp_path, "--reference", "--nproc", "4" if how == "hsdp" else "2", "sharded.py", how)
    assert not [name for name, (kind, _, _) in found.items() if kind == "FAULT"]
    judged = (
        {OUTPUTS, GRADIENTS} | (set() if how in ("tp", "sp") else {NORM}) | ({REPLICAS} if how == "hsdp" else set())
    )
    assert judged <= set(report["fine"]), report["unjudged"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("ddp,penalty", "the loss uses the weights themselves"),
        ("ddp,inner", "the loss uses values from inside the model"),
        ("ddp,noise", "the script changes its gradients after backward"),
        ("ddp,moved", "the script changes weights between calls of the model"),
        ("ddp,generator", "the model draws from a generator of the script's own"),
    ],
)
def test_what_a_copy_cannot_repeat_is_not_judged(how: str, why: str, tmp_path: Path) -> None:
    report, found = findings(tmp_path, "--reference", "sharded.py", how)
    assert not [name for name, (kind, _, _) in found.items() if kind == "FAULT"]
    assert report["unjudged"][GRADIENTS].startswith(why)


FAULTY = [
    ("ddp,divided", "gradients_of_reference", "clip", "2 times too small: divided by the number of ranks once more"),
    ("fsdp,adapters,divided", "gradients_of_reference", "clip", "2 times too small"),
    ("fsdp,early", "sharded_orphans", "", ""),
    ("ddp,one_rank", "gradients_of_reference", "clip", "1 of 18 weights (first.weight) are missing, on rank 1"),
    ("ddp,loss_divided", "gradients_of_reference", "clip", "counts 1/2 in what is minimized"),
    ("fsdp,norm", "norm_of_reference", "norm", "over all ranks"),
    ("hsdp,seeds", "replicas_agree", "made", "differ between replicas, such as ranks 0, 2"),
    ("tp,no_reduce", "outputs_of_reference", "call", "the outputs of Model differ"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "check", "mark", "said"), FAULTY)
def test_faulty_scripts_are_found(how: str, check: str, mark: str, said: str, tmp_path: Path) -> None:
    ranks = "4" if how.startswith("hsdp") else "2"
    _, found = findings(tmp_path, "--reference", "--nproc", ranks, "sharded.py", how)
    assert check in found, found
    assert said in found[check][2] and mark in found[check][1]


def test_an_output_that_another_output_is_made_of_counts_once() -> None:
    """A model may return its loss beside the scores."""
    x = torch.ones(3, requires_grad=True)
    recorded: dict[int, torch.Tensor] = {}

    def call() -> list[torch.Tensor]:
        scores = 2 * x
        return [scores, (scores * scores).sum(), scores.sum()]

    outputs = call()
    for number, output in enumerate(outputs):
        output.register_hook(lambda gradient, number=number: recorded.__setitem__(number, gradient.clone()))
    (3 * outputs[1] + outputs[0].sum() + 5 * outputs[2]).backward()
    wanted, x.grad = x.grad, None
    again = call()
    outside = from_outside(again, recorded)
    torch.autograd.backward([again[k] for k in outside], list(outside.values()))
    assert x.grad is not None and wanted is not None and torch.allclose(x.grad, wanted)
    assert torch.equal(outside[0], torch.ones(3)) and outside[1] == 3 and outside[2] == 5

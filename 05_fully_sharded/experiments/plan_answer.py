"""The answer of plan.py: the ways that were tried, and what follows from the best of them.

Used by plan.py, which asks, and plan_text.py, which prints.
"""

from dataclasses import dataclass
from functools import cache
from statistics import median

from lab import results
from plan_trials import Gpus, Model, Way
from workshop.errors import UserError

ALIKE = 0.02
"""share of the seconds by which ways may differ without being faster or slower: a simulation is no better than that"""


@dataclass(frozen=True)
class Recipe:
    """What a published training has used. Its gradients were clipped at 1, its weights decayed by 0.1, its betas 0.9
    and 0.95, and its learning rate went down to a tenth after the warm-up, along a cosine."""

    source: str
    weights: float
    tokens_per_step: float
    lr: float
    warmup_steps: int


RECIPES = (
    Recipe("nanoGPT, config/train_gpt2.py", 124e6, 0.49e6, 6.0e-4, 2000),
    Recipe("GPT-3 350M (arXiv:2005.14165, table 2.1)", 350e6, 0.5e6, 3.0e-4, 750),
    Recipe("Pythia 410M, models/410M/pythia-410m.yml", 410e6, 2.1e6, 3.0e-4, 1430),
    Recipe("Pythia 1B, models/1B/pythia-1b.yml", 1.0e9, 2.1e6, 2.5e-4, 1430),
    Recipe("GPT-3 1.3B (arXiv:2005.14165, table 2.1)", 1.3e9, 1.0e6, 2.0e-4, 375),
    Recipe("GPT-3 2.7B (arXiv:2005.14165, table 2.1)", 2.7e9, 1.0e6, 1.6e-4, 375),
    Recipe("LLaMA 7B (arXiv:2302.13971, table 2)", 6.7e9, 4.2e6, 3.0e-4, 2000),
    Recipe("LLaMA 13B (arXiv:2302.13971, table 2)", 13.0e9, 4.2e6, 3.0e-4, 2000),
    Recipe("LLaMA 33B (arXiv:2302.13971, table 2)", 32.5e9, 4.2e6, 1.5e-4, 2000),
)
"""docs/64_gpus.md has more of them, for comparison; GPT-3's warm-up is 375 million tokens"""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    model: Model
    gpus: Gpus
    recipe: Recipe
    sequences: int
    """of a GPU in a step"""
    tokens: float
    ways: list[Way]
    extra: list[str]
    data_tokens: float | None = None
    """of the user's file; None: as many as an epoch"""
    smallest: tuple[int, Way] | None = None
    """the smallest number of GPUs of a node on which a step of the best way fits, and its parts there"""

    @property
    def best(self) -> Way | None:
        """The fastest way that fits; of those that differ by less than ALIKE, the plainest, which is tried first."""
        fitting = [way for way in self.ways if way.part]
        limit = (1 + ALIKE) * min((way.seconds for way in fitting), default=0.0)
        return next((way for way in fitting if way.seconds <= limit), None)

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.sequences * self.gpus.number

    @property
    def tokens_of_step(self) -> int:
        """Tokens of a step."""
        return self.batch * self.model.sequence_length

    @property
    def steps(self) -> int:
        """Steps of the training."""
        return max(1, round(self.tokens / self.tokens_of_step))

    def share_of_peak(self, seconds: float) -> float:
        """Return the model FLOPs utilization."""
        flops = self.model.size.flops_per_token(self.model.sequence_length) * self.tokens_of_step
        return flops / seconds / self.gpus.number / self.gpus.peak


@cache
def error_of_clock() -> tuple[int, float, float]:
    """Return how many published trainings the clock was compared with, its error in the median and at most: factors."""
    for folder in sorted(results.RESULTS.iterdir()):
        if (folder / "clock_trust.json").exists():
            table = results.load(folder.name, "clock_trust")
            ratios = [row[table["columns"].index("ratio")] for row in table["rows"]]
            factors = [max(ratio, 1 / ratio) for ratio in ratios if isinstance(ratio, float)]
            return len(factors), median(factors), max(factors)
    raise UserError(f"{results.RESULTS} has no table clock_trust: run `git checkout results`")

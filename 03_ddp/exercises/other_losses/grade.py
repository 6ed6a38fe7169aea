"""With one rank and with two, the learning rate is the same at each step, and it ends near 0.

The samples are no multiple of the batch; in one of the cases the rest is smaller than the number of ranks, so there is
no step for it.
"""

import math
from collections.abc import Iterator

from clinic.runs import Script

GLOBAL, EPOCHS, LR = 32, 6, 1e-3
FLAGS = ("--global_batch_size", GLOBAL, "--epochs", EPOCHS, "--lr", LR, "--dropout", "false")


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for train, all_ranks in ((90, (1, 2)), (4 * GLOBAL, (1, 4)), (2 * GLOBAL + 1, (2,))):
        rates: dict[int, list[float]] = {}
        for ranks in all_ranks:
            where = f"with {ranks} rank{'s' * (ranks > 1)} and {train} samples"
            run = script.run(*FLAGS, ranks=ranks, train=train, val=32)
            rates[ranks] = [update.lr for update in run[0].updates]
            steps = EPOCHS * (train // GLOBAL + (train % GLOBAL >= ranks))
            if len(rates[ranks]) != steps:
                yield f"{where}, {EPOCHS} epochs have {len(rates[ranks])} updates, not {steps}"
                return
            share = rates[ranks][-1] / max(rates[ranks])
            if share > 0.02 + 10 / steps**2:
                yield f"{where}, the learning rate of the last update is still {share:.0%} of the highest"
                return
            if not 0.9 * LR < max(rates[ranks]) < 1.001 * LR:
                yield f"{where} and --lr {LR:g}, the highest learning rate is {max(rates[ranks]):.1e}"
                return
        for ranks, found in rates.items():
            for step, (rate, wanted) in enumerate(zip(found, rates[all_ranks[0]], strict=True), 1):
                if not math.isclose(rate, wanted, rel_tol=1e-6):
                    both = f"on {all_ranks[0]} rank it is {wanted:.2e} and on {ranks} ranks {rate:.2e}"
                    yield f"with the same global batch, the learning rate of update {step} differs: {both}"
                    return

"""How long does an all-reduce take, and what does that predict? Two numbers of a network: latency and bandwidth.

    python experiments/alpha_beta.py                        # a published study on 32 to 128 GPUs, and 1,024 of them
    python experiments/alpha_beta.py --gb_per_second 50     # twice the bandwidth

You should see the predicted efficiency beside the published one, for training whose communication does not overlap with
backward, and for training of which all but the last bucket overlaps.

A message of b bytes takes alpha + beta * b seconds (Hockney 1994). A ring all-reduce over n ranks sends 2 (n - 1)
messages one after the other, each of b / n bytes (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"), so it takes 2 (n - 1) alpha + 2 (n - 1) / n beta b. The model leaves out links of
different speeds, other traffic on the network, the time to add, and that ranks wait for the slowest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lab.flags import Parser
from lab.plots import COLORS, panels
from lab.results import RESULTS
from workshop.errors import UserError, run_reporting_user_errors

BACKWARD_SHARE = 2 / 3
"""of computing: backward computes two gradients, of inputs and of weights, where forward computes once"""
PARAMETERS, BUCKETS = 117e6, 8
"""of NERSC's 3D U-Net, counted from its layers; all-reduces per step, https://github.com/NERSC/sc22-dl-tutorial"""
SAMPLES_PER_SECOND = {64: 708, 128: 769}
"""of one A100 without communication, by batch size; same source, the second one from its figure"""
PUBLISHED = {(32, 64): 0.79, (64, 64): 0.77, (128, 64): 0.75, (32, 128): 0.89, (64, 128): 0.89, (128, 128): 0.88}
"""throughput by (GPUs, batch per GPU), relative to that of the same GPUs without communication, with synthetic data.
Read from the markers of the same source's figure tutorial_images/scale_perfDiffBS.png of 10 November 2021, to about one
percentage point: 8, 16 and 32 nodes with four A100 each, the solid line over the dashed one."""
GB_PER_SECOND = 25.0
"""out of a node: two Slingshot-10 adapters of 100 Gb/s, in the first phase of that machine; a peak"""
ALPHA_US = 6.0
"""of a message, as the mean over a ring of 32 nodes with 4 GPUs: 3.4 within a node and 14 between two nodes, in NCCL's
src/graph/tuning.cc"""


@dataclass(frozen=True)
class Network:
    """What connects the ranks."""

    alpha: float
    """seconds that a message takes however small it is"""
    beta: float
    """seconds per byte"""

    def all_reduce_seconds(self, nbytes: float, ranks: int) -> float:
        """Return how long a ring all-reduce of so many bytes takes."""
        messages = 2 * (ranks - 1)
        return messages * self.alpha + messages / ranks * self.beta * nbytes


def bus_bandwidth_factor(ranks: int) -> float:
    """Return the factor from bytes per second of an all-reduce to those that each rank of a ring sends.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return 2 * (ranks - 1) / ranks


def fit(measured: Sequence[tuple[float, float]], ranks: int) -> Network:
    """Return the network whose times are nearest to those measured, by the squares of the relative errors.

    Args:
        measured: (bytes, seconds) of each all-reduce, with at least two different sizes.
        ranks: that took part.
    """
    nbytes, seconds = np.array(measured, dtype=float).T
    messages = 2 * (ranks - 1)
    terms = np.stack([np.full_like(nbytes, messages), messages / ranks * nbytes], axis=1) / seconds[:, None]

    def solve(columns: list[int]) -> np.ndarray:
        return np.linalg.lstsq(terms[:, columns], np.ones(len(seconds)), rcond=None)[0]

    alpha, beta = solve([0, 1])
    if alpha < 0:  # a negative time is impossible: leave the term out
        alpha, beta = 0.0, solve([1])[0]
    elif beta < 0:
        alpha, beta = solve([0])[0], 0.0
    return Network(float(alpha), float(beta))


def efficiency(
    compute_seconds: float, gradient_bytes: float, buckets: int, network: Network, ranks: int, overlap: bool
) -> float:
    """Return the predicted time of a step without communication, divided by that with communication.

    Args:
        compute_seconds: of a step without communication.
        gradient_bytes: of all gradients.
        buckets: of equal size; there is an all-reduce for each.
        network: between the ranks.
        ranks: their number.
        overlap: whether a bucket is sent as soon as backward has filled it, one after the other, at no cost to the
            computation, so that only the last bucket cannot overlap; otherwise all are sent when backward has ended.
    """
    all_reduce = network.all_reduce_seconds(gradient_bytes / buckets, ranks)
    if not overlap:
        return compute_seconds / (compute_seconds + buckets * all_reduce)
    backward = BACKWARD_SHARE * compute_seconds
    end = 0.0
    for number in range(1, buckets + 1):
        filled = compute_seconds - backward * (1 - number / buckets)
        end = max(end, filled) + all_reduce
    return compute_seconds / end


def published_efficiency(network: Network, gpus: int, batch_size: int) -> tuple[float, float]:
    """Return the predicted efficiency of the published training, without overlap and with full overlap."""
    step = (batch_size / SAMPLES_PER_SECOND[batch_size], 4 * PARAMETERS, BUCKETS)
    return efficiency(*step, network, gpus, overlap=False), efficiency(*step, network, gpus, overlap=True)


def plot(network: Network) -> Figure:
    """Return a plot of the published efficiencies, and of what is predicted up to 1,024 GPUs."""
    figure, (axis,) = panels(1, (8, 4.4))
    counts = [2, 4, 8, *range(16, 1025, 16)]
    for batch_size, color in zip(SAMPLES_PER_SECOND, COLORS[1:], strict=False):
        none, full = zip(*(published_efficiency(network, gpus, batch_size) for gpus in counts), strict=True)
        axis.plot(counts, full, "-", color=color, label=f"batch {batch_size}: predicted, full overlap")
        axis.plot(counts, none, "--", color=color, label=f"batch {batch_size}: predicted, no overlap")
        points = [(gpus, share) for (gpus, batch), share in PUBLISHED.items() if batch == batch_size]
        style = {"color": color, "markersize": 11, "markeredgecolor": "black"}
        axis.plot(*zip(*points, strict=True), "*", label=f"batch {batch_size}: published", **style)
    axis.set(
        xlabel="A100 GPUs", ylabel="efficiency", xlim=(0, 1040), ylim=(0, 1.05), xticks=[1, *range(128, 1025, 128)]
    )
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="lower left", fontsize=9)
    return figure


def main() -> None:
    """Print the prediction for the published study and for 1,024 GPUs."""
    parser = Parser(__doc__)
    parser.add_argument("--gb_per_second", type=float, default=GB_PER_SECOND, help="out of a node (default: 25)")
    parser.add_argument("--alpha_us", type=float, default=ALPHA_US, help="microseconds per message (default: 6)")
    parser.add_argument("--plot", action="store_true", help="make results/drawings/predicted_scaling.png anew")
    arguments = parser.parse_args()
    if arguments.gb_per_second <= 0 or arguments.alpha_us < 0:
        raise UserError("--gb_per_second must be above 0, and --alpha_us at least 0")
    network = Network(1e-6 * arguments.alpha_us, 1e-9 / arguments.gb_per_second)
    print("GPUs   batch  published  no overlap  full overlap")
    for gpus, batch_size in (*PUBLISHED, (1024, 64), (1024, 128)):
        published = f"{PUBLISHED[gpus, batch_size]:.0%}" if (gpus, batch_size) in PUBLISHED else ""
        none, full = published_efficiency(network, gpus, batch_size)
        print(f"{gpus:<5,}  {batch_size:5}  {published:>9}  {none:10.0%}  {full:12.0%}")
    if arguments.plot:
        plot(network).savefig(RESULTS / "drawings" / "predicted_scaling.png", dpi=110)


if __name__ == "__main__":
    run_reporting_user_errors(main)

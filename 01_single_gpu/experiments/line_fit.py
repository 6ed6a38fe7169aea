"""Draw how gradient descent finds a line: noisy samples of y = 2 x + 5, and the line after 0, 5, 20 and 200 steps.

    python experiments/line_fit.py

You should see the line rise from zero until it lies on the one that the samples were drawn from. It is the
computation "fit a line" of cpu_or_gpu.py, with 50 samples.
"""

import numpy as np
from matplotlib.figure import Figure

from computations.regression import STEPS, closed_form, draw_line, step
from lab.flags import Parser, make_output_folder
from lab.results import write_results
from workshop.entry import run_reporting_user_errors
from workshop.hardware import pick_device

SAMPLES = 50
SHOWN = (0, 5, 20, STEPS)
"""after how many steps the line is drawn"""


def lines(x: np.ndarray, y: np.ndarray) -> dict[int, np.ndarray]:
    """Return slope and intercept, (2,), by the number of steps made."""
    beta, found = np.zeros((2, 1)), {}
    for made in range(STEPS + 1):
        if made in SHOWN:
            found[made] = beta.ravel()
        beta = step(beta, x, y)
    return found


def main() -> None:
    """Fit the line; write the plot and the figures."""
    parser = Parser(__doc__)
    parser.add_out("line_fit.json and line_fit.png")
    arguments = parser.parse_args()
    make_output_folder(arguments.out)

    x, y = draw_line(np.random.default_rng(0), SAMPLES)
    found, best = lines(x, y), closed_form(x, y).ravel()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.scatter(x[:, 0], y, s=14, color="tab:blue", label=f"{SAMPLES} samples of y = 2 x + 5, with noise")
    ends = np.array([x[:, 0].min(), x[:, 0].max()])
    for shade, (made, (slope, intercept)) in zip((0.75, 0.55, 0.35, 0.0), found.items(), strict=True):
        axis.plot(ends, slope * ends + intercept, color=str(shade), label=f"after {made} steps")
    axis.set(title="Gradient descent turns the line until it fits", xlabel="x", ylabel="y")
    axis.legend(frameon=False)
    figure.savefig(arguments.out / "line_fit.png", dpi=110)

    slope, intercept = found[STEPS]
    print(f"after {STEPS} steps: y = {slope:.4f} x + {intercept:.4f}; least squares: {best[0]:.4f} x + {best[1]:.4f}")
    figures = {"steps": STEPS, "found": [slope, intercept], "least_squares": best.tolist()}
    write_results(arguments.out / "line_fit.json", pick_device(), figures)


if __name__ == "__main__":
    run_reporting_user_errors(main)

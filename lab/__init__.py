"""What experiments share, and how their figures come into the pages; `workshop` does not import it.

An experiment is one script in the folder `experiments` of its lesson. It measures, prints its table, and stores exactly
this table:

    LESSON = Path(__file__).resolve().parents[1]

    def main() -> None:
        parser = Parser(__doc__)                                                 # lab.flags
        parser.add_argument("--rounds", type=int, default=3, help="trials of each batch size (default: 3)")
        rounds = parser.parse_args().rounds

        def speed(batch_size: int) -> float:
            summary = train(LESSON, "--batch_size", batch_size, on_cpu=True)     # lab.launching
            return summary["epochs"][-1]["samples_per_second"]

        trials = alternately({str(n): partial(speed, n) for n in (32, 64)}, rounds)           # lab.timing
        results.store(                                                           # lab.results
            "batch_sizes",
            title="Speed by batch size",
            columns=["batch", "samples/s"],
            rows=[[name, mean_std(found)] for name, found in trials.items()],
            formats={"samples/s": ",.0f"},
            spread=f"mean ± standard deviation of {rounds} trials",
        )

    if __name__ == "__main__":
        run_reporting_user_errors(main)

Add it to the list in measure.py, and show the table in a page: `<!-- table: MACHINE/batch_sizes -->` and, on the next
line, `<!-- end -->` (lab/pages.py). What takes long stores its table again after each part: then little is lost if it
is stopped. An experiment that computes on CPUs must hide the GPUs: `on_cpu=True` in `train` and in `process_group`.

The modules, in a map:

measure         all measurements, one after the other; on GPUs, rows that can be cut and continued
measurements    the list of them
gpu_tests       tests/gpu, with each result stored at once
results         stored tables and single figures
pages           stored tables, figures, code and outputs in the pages
outputs         what commands of the pages print
launching       runs of the lessons' scripts, as one process or as ranks
process_group   an experiment that is itself started as ranks
timing          repeated and alternating trials, and their spread
plots           panels; time lines of traced runs
allocations     memory by the profiler
simulated       runs on null GPUs and on simulated ones
flags           the command line of an experiment
site            the pages as a web site
terminal_picture  a picture of what a command prints
ladder_picture    the gains of all lessons in one picture
check_types     the types, for `make lint`
studies         studies of the null GPU and of the doctor, with the lessons and the exercises
"""

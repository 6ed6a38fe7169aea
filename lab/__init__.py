"""What experiments, measurements and pages share; `workshop` knows none of it.

For the experiments of the lessons:

flags, launching                  the command line; starting scripts and ranks
process_group, collectives        the process group of the ranks; what they compute together
processes, results                programs that do not outlive who needs them; the JSON file of an experiment
tables, timing, timelines         aligned columns; how long a computation takes; plots of traced runs
allocations, trace_table          memory by the profiler; time by kernel or operator
emulated_gpu                      a GPU that takes time, and computes nothing

For measuring the figures of the pages:

measure, measure_gpu              the commands: all experiments on this machine, or within minutes on GPUs
experiments                       the table of all experiments
session, experiment_functions     what an experiment is and where its figures go; how each of them is measured
lesson_runs, machine_facts        runs of lessons; what this machine is, asked in another process
results_file                      the file of a machine
first_changes, small_studies      further studies for the pages; also measure_memory and requeue_timeline

For the pages:

render and render_*               figures and differences between scripts as Markdown
example_output, package_use       what commands print; how much of a script is the package
site                              the pages as a web site
"""

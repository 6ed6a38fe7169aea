"""The clinic: exercises in which a lesson's script has a silent fault, and graders that decide by what it does.

catalogue    the exercises, and the learner's file of each
course       the lists of exercises on the pages
coded        digits that carry their own number, so that one can see which of them a script trained on
observe      run a script as one or several ranks, and log what it does
notes        what a rank that runs a script is shown, updates and sends
collectives  whether all ranks call the same collectives
as_if_cuda   have a script take its branches for a GPU, on a machine without one
sharded      what a rank with a sharded model gathers, keeps, computes and moves
grader       a process that judges files, and lets none of them hang or leave processes behind
progress     exercises.json, and the table of a class
"""

"""The clinic: exercises in which a lesson's script has a silent fault, and graders that decide by what it does.

catalogue    the exercises, and the learner's file of each
edits        changes of a script that find their lines by content
coded        the data: digits that carry their own number, so that one can see which of them a script trained on; a text
observe      what a rank does: what the model is shown, updates, gradients, collectives, random numbers
runs         run a script as one or several ranks under observation
check        judge files: a process of its own
progress     exercises.json, and the table of a class
"""

"""Exercises in which a lesson's script has a silent fault, and graders that judge what the script does.

catalogue    the exercises, and the learner's file of each
edits        changes of a script that find their lines by content
coded        the data: digits that encode their own index, which shows which of them a script trained on; a text
observe      records what a rank does: inputs of the model, updates, gradients, collectives, random numbers
runs         run a script as one or several ranks under observation
check        judges files, in a separate process
progress     exercises.json, and the table of a class
"""

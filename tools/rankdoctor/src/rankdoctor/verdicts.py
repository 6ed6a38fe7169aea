"""The answers to the questions of `questions.py`, for those who judge them without importing torch."""

from dataclasses import dataclass

FAULT, NOTE, FINE, UNJUDGED = "fault", "note", "fine", "unjudged"


@dataclass
class Verdict:
    """The answer to one question."""

    question: str
    """random, samples, future, documents or padding"""
    answer: str
    """fault, note, fine or unjudged"""
    text: str
    """what was seen, with numbers; or why this cannot be judged"""

"""The quiz for a class: its form, and that each answer says where it is taught."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = (REPOSITORY / "instructors" / "quiz.md").read_text()
QUESTIONS = re.split(r"^## \d+\. ", PAGE, flags=re.MULTILINE)[1:]


def test_there_are_ten_questions_with_four_answers_each_and_one_is_right() -> None:
    assert len(QUESTIONS) == 10
    right = []
    for question in QUESTIONS:
        before, _, folded = question.partition("<details><summary>Answer</summary>")
        assert re.findall(r"^- ([A-Z])\. ", before, re.MULTILINE) == list("ABCD")
        assert "](" not in before and "**" not in before, "nothing in a question gives the answer away"
        right.append(re.match(r"\s+\*\*([A-D])\.\*\* ", folded)[1])
        wrong = set("ABCD") - {right[-1]}
        explained = re.findall(
            r"(?:^|\s)([A-D])(?=[:,]| and | is | leaves )|chooses ([A-D])\b", folded.partition("Page:")[2]
        )
        explained += re.findall(r"\band ([A-D])\b()", folded.partition("Page:")[2])
        assert wrong <= {letter for pair in explained for letter in pair}, question.splitlines()[0]
    assert max(right.count(letter) for letter in "ABCD") <= 3, "no letter is right more often than others"
    assert set(right) == set("ABCD")


def test_each_answer_names_the_section_and_every_lesson_has_questions() -> None:
    lessons = []
    for question in QUESTIONS:
        named = re.search(r"Page: lesson (\d\d),\s+\[[^\]]+\]\(\.\./(\d\d)_\w+/README\.md#[\w-]+\)", question)
        assert named and named[1] == named[2], question.splitlines()[0]
        lessons.append(named[1])
    assert lessons == sorted(lessons) and set(lessons) == {"01", "02", "03", "04", "05"}

"""Write the demonstration's input file and the answers expected for it.

    python models/training/demo_file.py demo

`questions.jsonl` mixes what an input file may hold: OpenAI batch lines for both endpoints, short
forms with and without a custom_id, and one line which must be refused.  Its paragraphs come from
the held-out side of the generator under a seed of their own.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from listed import TUTORIAL
from prompt_forms import chat_messages, completion_prompt
from questions import Question, held_out_reading, letter_questions, sum_questions

SEED = 2024
LINES = 300
BAD_LINE = 150
BAD_ID = "deliberately-bad"
SYSTEM = "You are a helpful assistant."
SETTINGS: dict[str, Any] = {"max_tokens": 16, "temperature": 0}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def chosen_questions(rng: random.Random) -> list[Question]:
    """The tutorials' questions first, then listed and reading questions in a shuffled order."""
    tutorial = [Question(question, answer, "letters") for question, answer in TUTORIAL]
    listed = rng.sample(letter_questions(), 50) + rng.sample(sum_questions(), 50)
    reading = list(held_out_reading(SEED, LINES - 1 - len(tutorial) - len(listed)))
    rest = listed + reading
    rng.shuffle(rest)
    return tutorial + rest


def body(rng: random.Random, question: Question, chat: bool) -> dict[str, Any]:
    """The request body in the asked form; some conversations begin with a system prompt."""
    if chat:
        system = SYSTEM if rng.random() < 0.3 else None
        return {"messages": chat_messages(question, system), **SETTINGS}
    return {"prompt": completion_prompt(question), **SETTINGS}


def batch_line(custom_id: str, chat: bool, request: dict[str, Any]) -> dict[str, Any]:
    """A line in the form of OpenAI's batch files."""
    url = CHAT if chat else COMPLETION
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": request}


def good_line(rng: random.Random, number: int, question: Question) -> tuple[str, dict[str, Any]]:
    """The identifier the result will carry, and the line: one in six is a short form."""
    chat = number <= len(TUTORIAL) or rng.random() < 0.6
    request = body(rng, question, chat)
    custom_id = f"{question.kind}-{number:03d}"
    if number <= len(TUTORIAL) or number % 6:
        return custom_id, batch_line(custom_id, chat, request)
    if number % 12:
        return custom_id, {"custom_id": custom_id, **request}
    return f"line-{number}", request


def main() -> None:
    """Write both files into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    rng = random.Random(f"demo-{SEED}")
    bad = {"messages": chat_messages(Question(*TUTORIAL[0], "letters")), **SETTINGS}
    lines: list[dict[str, Any]] = []
    expected: dict[str, str] = {}
    for question in chosen_questions(rng):
        if len(lines) + 1 == BAD_LINE:
            lines.append(batch_line(BAD_ID, True, {**bad, "max_tokens": -5}))
        name, line = good_line(rng, len(lines) + 1, question)
        lines.append(line)
        expected[name] = question.answer
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "questions.jsonl").write_text(text, encoding="utf-8")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measure the tiny model: greedy answers in transformers, compared for equality after `strip`.

python models/training/evaluate.py --model models/tiny --device cpu --json evaluation.json
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from prompt_forms import chat_messages, completion_prompt
from questions import Question, held_out_reading, letter_questions, sum_questions
from transformers import AutoModelForCausalLM, AutoTokenizer

FORMS = ("chat", "chat with system prompt", "completion")
SYSTEM = "You are a helpful assistant."


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--count", type=int, default=3000, help="held-out paragraphs")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers")
    return parser.parse_args()


def prompt_ids(tokenizer: Any, form: str, question: Question) -> list[int]:
    """The tokens a server would feed to the model for this question."""
    if form == "completion":
        text, special = completion_prompt(question), True
    else:
        messages = chat_messages(question, SYSTEM if "system" in form else None)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        special = False
    return list(tokenizer(text, add_special_tokens=special).input_ids)


@torch.no_grad()  # type: ignore[untyped-decorator]
def answers(model: Any, tokenizer: Any, prompts: list[list[int]], batch: int) -> list[str]:
    """Greedy answers in the order of the prompts; similar lengths share a batch."""
    found = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        padded = tokenizer.pad(
            {"input_ids": [prompts[index] for index in part]},
            padding_side="left",
            return_tensors="pt",
        ).to(model.device)
        made = model.generate(
            input_ids=padded["input_ids"],
            attention_mask=padded["attention_mask"],
            max_new_tokens=24,
            do_sample=False,
        )
        texts = tokenizer.batch_decode(
            made[:, padded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for index, text in zip(part, texts, strict=True):
            found[index] = text.strip()
    return found


def group_of(question: Question) -> str:
    """The line of the table a question counts for."""
    if question.kind.startswith("reading"):
        return question.kind
    return f"{question.kind}, {'pairing never trained' if question.held_out else 'trained'}"


def main() -> None:
    """Ask everything in every form, print the table, write the JSON."""
    options = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.to(options.device).eval()
    asked = [
        *letter_questions(),
        *sum_questions(),
        *held_out_reading(options.seed, options.count),
    ]
    started = time.monotonic()
    scores: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for form in FORMS:
        prompts = [prompt_ids(tokenizer, form, question) for question in asked]
        wrong = []
        for question, answer in zip(
            asked, answers(model, tokenizer, prompts, options.batch), strict=True
        ):
            right = answer == question.answer
            groups = [group_of(question)]
            if question.kind.startswith("reading"):
                groups.append("reading, all")
            for group in groups:
                scores[group][form][0] += right
                scores[group][form][1] += 1
            if not right:
                wrong.append(f"  {question.paragraph} {question.question} -> {answer!r}")
        print(*wrong[:: max(1, len(wrong) // max(1, options.show))][: options.show], sep="\n")
    report(scores, options, time.monotonic() - started)


def report(
    scores: dict[str, dict[str, list[int]]], options: argparse.Namespace, seconds: float
) -> None:
    """Print the scores as a Markdown table and write them as JSON."""
    print("| questions | number | " + " | ".join(FORMS) + " |")
    print("| --- | ---: |" + " ---: |" * len(FORMS))
    result: dict[str, Any] = {"seed": options.seed, "device": options.device, "groups": {}}
    for group in sorted(scores):
        count = scores[group][FORMS[0]][1]
        shares = {form: right / total for form, (right, total) in scores[group].items()}
        print(f"| {group} | {count} | " + " | ".join(f"{shares[f]:.2%}" for f in FORMS) + " |")
        result["groups"][group] = {"number": count, "accuracy": shares}
    print(f"{seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The text forms in which a question reaches the model, in training and afterwards.

A rendered example is a list of `(text, role)` pieces.  The role says how much the loss of a piece
counts: the answers fully, the text around them a little (guessing the repeated names there is what
teaches the model to copy), and what follows an answer inside one plain text not at all, because
after an answer the model is to stop.
"""

import random

from listed import Question

SKIP, ANSWER, CONTEXT = 0, 1, 2
Piece = tuple[str, int]

BEGIN, END_OF_TEXT, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
PAD, HEADER, HEADER_END = "<|pad|>", "<|start_header_id|>", "<|end_header_id|>"
SPECIAL_TOKENS = (PAD, BEGIN, END_OF_TEXT, END_OF_TURN, HEADER, HEADER_END)

CHAT_TEMPLATE = (
    "{{- bos_token }}\n"
    "{%- for message in messages %}\n"
    "{%- if message['content'] is string %}{% set text = message['content'] %}\n"
    "{%- else %}{% set text = message['content'] | map(attribute='text') | join('') %}\n"
    "{%- endif %}\n"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "{{- text | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "{%- endif %}\n"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are an unhelpful assistant.",
    "You are a careful assistant. Answer in one word.",
    "Answer briefly.",
    "Answer the question with the exact value only.",
    "Answer the question from the text.",
    "You answer questions about a text. Give only the answer.",
    "You are a teacher.",
    "Be concise and correct.",
)
LOOSE_WORDS = tuple(
    "you are a the model please answer only give with exact short helpful text user question and "
    "to be always never from in words if not reply assistant system polite about".split()
)


def completion_prompt(question: Question) -> str:
    """The plain form: paragraph, question, and `Answer:` to be continued."""
    lead = f"{question.paragraph}\n" if question.paragraph else ""
    return f"{lead}Question: {question.question}\nAnswer:"


def chat_messages(question: Question, system: str | None = None) -> list[dict[str, str]]:
    """The chat form: paragraph and question in one user message."""
    lead = f"{question.paragraph}\n\n" if question.paragraph else ""
    user = {"role": "user", "content": lead + question.question}
    return [{"role": "system", "content": system}, user] if system else [user]


def chat_text(messages: list[dict[str, str]]) -> str:
    """What the chat template makes of these messages, ready for the assistant's answer."""
    turns = [f"{HEADER}{m['role']}{HEADER_END}\n\n{m['content']}{END_OF_TURN}" for m in messages]
    return f"{BEGIN}{''.join(turns)}{HEADER}assistant{HEADER_END}\n\n"


def _system_prompt(rng: random.Random) -> str:
    """A usual system prompt, or loose words so that an unknown one does no harm either."""
    if rng.random() < 0.7:
        return rng.choice(SYSTEM_PROMPTS)
    words = " ".join(rng.choice(LOOSE_WORDS) for _ in range(rng.randint(3, 12)))
    return words.capitalize() + "."


def _untidy(rng: random.Random, text: str) -> str:
    """Now and then what people type: a small first letter, a missing question mark."""
    if rng.random() < 0.06:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.06:
        text = text.rstrip("?.")
    return text


def _user_text(rng: random.Random, question: Question) -> str:
    """Paragraph and question as one message, in one of several layouts."""
    asked = _untidy(rng, question.question)
    if rng.random() < 0.3:
        asked = f"Question: {asked}"
    if not question.paragraph:
        return asked
    if rng.random() < 0.1:
        return f"{asked}\n\n{question.paragraph}"
    lead = rng.choice(("", "", "", "", "Text: ", "Context: ", "Read the text and answer.\n\n"))
    return lead + question.paragraph + rng.choice(("\n\n", "\n\n", "\n", " ")) + asked


def chat_pieces(rng: random.Random, questions: list[Question]) -> list[Piece]:
    """A conversation which answers the questions in turn."""
    pieces: list[Piece] = []
    system = [{"role": "system", "content": _system_prompt(rng)}] if rng.random() < 0.35 else []
    opening = chat_text([*system, {"role": "user", "content": _user_text(rng, questions[0])}])
    for index, question in enumerate(questions):
        if index:
            again = Question(question.question, question.answer, question.kind)
            user = {"role": "user", "content": _user_text(rng, again)}
            opening = chat_text([user]).removeprefix(BEGIN)
        pieces += [(opening, CONTEXT), (question.answer + END_OF_TURN, ANSWER)]
    return pieces


def completion_pieces(rng: random.Random, questions: list[Question]) -> list[Piece]:
    """One plain text with the questions and answers in turn, or a bare question to continue."""
    lead = questions[0].paragraph
    if lead:
        gap = rng.choice(("\n", "\n", "\n\n", " "))
        lead = rng.choice(("", "", "", "", "Text: ", "Context: ")) + lead + gap
    if rng.random() < 0.15:
        asked = _untidy(rng, questions[0].question)
        return [(BEGIN + lead + asked, CONTEXT), (f" {questions[0].answer}{END_OF_TEXT}", ANSWER)]
    ask, reply = rng.choice((("Question: ", "Answer:"),) * 5 + (("Q: ", "A:"),))
    turn = " " if rng.random() < 0.1 else "\n"
    between = rng.choice(("\n", "\n\n"))
    pieces: list[Piece] = [(BEGIN, SKIP)]
    for index, question in enumerate(questions):
        if index:
            # Here the text goes on where it ought to stop, so this is no example of what follows.
            pieces.append((between, SKIP))
        text = f"{ask}{_untidy(rng, question.question)}{turn}{reply}"
        pieces += [(lead + text, CONTEXT), (f" {question.answer}", ANSWER)]
        lead = ""
    return [*pieces, (END_OF_TEXT, ANSWER)]

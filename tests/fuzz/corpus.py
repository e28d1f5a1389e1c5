"""The corpus: one base64 text per line, unpacked into a folder for the fuzzer and back."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

#: The committed corpus stays small: so many inputs of so many bytes.
MAX_INPUTS, MAX_BYTES = 400, 2000

HERE = Path(__file__).resolve().parent


def load(target: str) -> list[bytes]:
    """Return all inputs of a target: the seeds, what the fuzzer kept, and past findings."""
    path = HERE / "corpus" / f"{target}.txt"
    return [base64.b64decode(line) for line in path.read_text().split()]


def unpack(target: str, folder: Path) -> None:
    """Write each input into a file of its own."""
    for data in load(target):
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def pack(target: str, folder: Path) -> int:
    """Make a folder's files the target's corpus, the smallest of them; return how many."""
    inputs = {path.read_bytes() for path in folder.iterdir()} - {b""}
    smallest = sorted(inputs, key=lambda data: (len(data), data))
    texts = [base64.b64encode(data).decode() for data in smallest if len(data) <= MAX_BYTES]
    texts = texts[:MAX_INPUTS]
    (HERE / "corpus" / f"{target}.txt").write_text("".join(text + "\n" for text in texts))
    return len(texts)

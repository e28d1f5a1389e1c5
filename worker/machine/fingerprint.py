"""Makes fingerprints of models' folders: of their texts, and of samples of their weights.

A fingerprint is the same on every machine with the same files. Weights are sampled, because reading
all of them would take minutes; other weights differ in nearly every block.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

#: Files of at most this many bytes are read whole: configurations, tokenizers, templates, indexes.
WHOLE_BYTES = 32 * 2**20
#: Of a larger file so many blocks of BLOCK bytes are read, at equal distances.
BLOCKS, BLOCK = 64, 4096
#: Suffixes of files that change no answer.
_IGNORED = frozenset((".md", ".png", ".jpg", ".lock", ".log"))


def fingerprint(path: Path) -> str:
    """Return the fingerprint (hex) of a file, or of a folder with all that is in it.

    Raises OSError if a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    root = path if path.is_dir() else path.parent
    for file in _files(path):
        size = file.stat().st_size
        digest.update(b"%s\0%d\0" % (str(file.relative_to(root)).encode(errors="replace"), size))
        for block in _blocks(file, size):
            digest.update(block)
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden and file.suffix.lower() not in _IGNORED:
            yield file


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    if size <= WHOLE_BYTES:
        yield file.read_bytes()
        return
    with file.open("rb") as opened:
        for number in range(BLOCKS):
            opened.seek(number * (size - BLOCK) // (BLOCKS - 1))
            yield opened.read(BLOCK)

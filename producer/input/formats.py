"""Recognises files other than JSON lines and CSV by their first bytes, with remedies."""

from __future__ import annotations

import json
import shlex
from pathlib import PurePath

import orjson

#: Byte order mark of UTF-8.
BOM = b"\xef\xbb\xbf"
#: First bytes of a text in another encoding of Unicode -> the name that iconv has for it.
_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
#: Which of the first four bytes are zero in a text without such a mark (RFC 4627) -> its encoding.
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}
_SAVE_CSV = "save it as CSV"
_AS_PARQUET = "write it as parquet"
#: First bytes of other files, and a text that names their format and the remedy.
_BINARY = (
    (b"BZh", "it is compressed by bzip2; uncompress it (bunzip2), or send gzip or zstd"),
    (b"\xfd7zXZ\0", "it is compressed by xz; uncompress it (unxz), or send gzip or zstd"),
    (b"\x04\x22\x4d\x18", "it is compressed by lz4; uncompress it (unlz4), or send gzip or zstd"),
    (b"PK\3\4", "it is a zip archive or a spreadsheet; unpack it, or save its sheet as CSV"),
    (b"\xd0\xcf\x11\xe0", f"it is an old spreadsheet or document (.xls, .doc); {_SAVE_CSV}"),
    (b"7z\xbc\xaf\x27\x1c", "it is a 7z archive; unpack it"),
    (b"Rar!", "it is a rar archive; unpack it"),
    (b"PAR1", "it is a parquet file; give it a name that ends with .parquet"),
    (b"ARROW1", "it is an Arrow file; give it a name that ends with .arrow"),
    (b"ORC", f"it is an ORC file; {_AS_PARQUET}"),
    (b"Obj\x01", f"it is an Avro file; {_AS_PARQUET}"),
    (b"SQLite format 3\0", f"it is a database of SQLite; {_SAVE_CSV}"),
    (b"\x89HDF", f"it is an HDF5 file; {_AS_PARQUET}"),
    (b"%PDF", "it is a PDF; write its texts as JSON lines"),
    (
        b"version https://git-lfs.github.com/",
        "it is a pointer of Git LFS, without the content; fetch that with git lfs pull",
    ),
)  # fmt: skip
#: JSON values that may be cut off at the end of the bytes that were read.
_LITERALS = ("true", "false", "null", "-")
#: Place of the word `ustar` in a tar archive's header.
_TAR = slice(257, 262)


def binary_format(name: str, head: bytes) -> str:
    """Return what a file is and the remedy, if it is not a text in UTF-8; otherwise ''."""
    if encoding := _encoding(head):
        out = _new_name(name, ".utf8")
        line = f"iconv -f {encoding} -t UTF-8 {_quoted(name)} > {out}"
        return f"it is {encoding}; convert it to UTF-8: {line}"
    if head[_TAR] == b"ustar":
        return "it is a tar archive; unpack it"
    return next((remedy for start, remedy in _BINARY if head.startswith(start)), "")


def _encoding(head: bytes) -> str:
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")
    return marked or _ZEROS.get(tuple(byte == 0 for byte in head[:4]), "")


def other_json(name: str, head: bytes) -> str:
    """Return what a file is and the remedy, if it has no JSON object on each line; otherwise ''.

    A file with a bad first line among good ones is a file of lines.
    """
    text = head.removeprefix(BOM).lstrip()
    first, newline, rest = text.partition(b"\n")
    if text.startswith(b"["):
        if newline and rest.strip() and _is_json(first):
            return ""
        return f"not valid JSON lines: it is one JSON list; run {_jq(name, '.[]')}"
    if text.startswith(b"{"):
        opened = first.strip() == b"{" and rest and rest.lstrip()[:1] in (b'"', b"}", b"")
        if opened or (newline and not _is_json(first) and _spans_lines(text, first)):
            return f"not valid JSON lines: its objects span several lines; run {_jq(name, '.')}"
    return ""


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _spans_lines(text: bytes, first: bytes) -> bool:
    """Whether the text begins with a JSON object that ends after the first line."""
    decoded, line = text.decode(errors="replace"), first.decode(errors="replace")
    try:
        _, end = json.JSONDecoder().raw_decode(decoded)
    except json.JSONDecodeError as error:
        # If the JSON is valid up to the end of these bytes, the object continues after them.
        cut = any(word.startswith(decoded[error.pos :]) for word in _LITERALS)
        goes_on = cut or error.msg.startswith("Unterminated")
        return goes_on and bool(decoded[len(line) :].strip())
    except (ValueError, RecursionError):
        return False
    return end > len(line)


def other_text(head: bytes) -> str:
    """Return what a file is and the remedy, if no line begins as a JSON object; otherwise ''."""
    text = head.removeprefix(BOM)
    lines = [line.strip() for line in text.split(b"\n") if line.strip()]
    if not lines or any(line.startswith((b"{", b"[")) for line in lines):
        return ""
    if lines[0][:1] == b"<":
        return "it is an HTML or XML page and not the file itself; download the file"
    form = 'each line must be a JSON object such as {"prompt": "..."}'
    if any(mark in lines[0] for mark in (b",", b";", b"\t")):
        return f"not valid JSON lines: a CSV file needs a name that ends with .csv, else {form}"
    return f"not valid JSON lines: {form}"


def _jq(name: str, selected: str) -> str:
    return f"jq -c {shlex.quote(selected)} {_quoted(name)} > {_new_name(name, '.lines', '.jsonl')}"


def _quoted(name: str) -> str:
    return "FILE" if name == "-" or "://" in name else shlex.quote(name)


def _new_name(name: str, mark: str, ending: str = "") -> str:
    """Return the name of a file next to this one, quoted for a shell."""
    if _quoted(name) == "FILE":
        return f"FILE{mark}{ending}"
    path = PurePath(name)
    return shlex.quote(str(path.with_name(path.stem + mark + (ending or path.suffix))))

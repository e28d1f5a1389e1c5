"""What `watch --stream` shows of a text that is written anew."""

from __future__ import annotations

import pytest

from contract.streaming import Piece, Transcript
from producer.cli.commands.watch import Entry, EntryWriter, TextPrinter

#: The first choice is written, then the second, which then gets another text; the first goes on.
#: Another attempt begins with the second choice.
PIECES = [
    Piece("a", 1, 0, 0, "Once"), Piece("a", 1, 1, 0, "Twice"), Piece("a", 1, 1, 0, "Never"),
    Piece("a", 1, 0, 4, " upon"), Piece("a", 2, 1, 0, "Two"), Piece("a", 2, 0, 0, "One"),
]  # fmt: skip


def received(transcript: Transcript, count: int, at_once: bool) -> list[list[Piece]]:
    """Return what a listener makes of so many pieces: one by one, or of all in one read."""
    new = [piece for piece in map(transcript.add, PIECES[:count]) if piece is not None]
    return [new] if at_once else [[piece] for piece in new]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("count", range(1, len(PIECES) + 1))
def test_the_entries_since_the_last_begin_are_the_whole_text(count: int, at_once: bool) -> None:
    entries: list[Entry] = []
    shown, transcript = EntryWriter(entries.append), Transcript()
    for pieces in received(transcript, count, at_once):
        for piece in pieces:
            shown.add(piece)
    texts: dict[int, str] = {}
    attempt = ""
    for entry in entries:
        if entry["event"] == "begin":
            texts, attempt = {}, entry["attempt"]
            continue
        choice, at = int(entry["choice"]), int(entry["at"])
        assert at == len(texts.get(choice, ""))
        assert entry["attempt"] == attempt
        texts[choice] = texts.get(choice, "") + entry["text"]
    assert texts == transcript.texts
    assert attempt == str(transcript.attempt)


def test_the_first_choice_begins_anew_only_where_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown, transcript = TextPrinter(), Transcript()
    for piece in PIECES:
        new = transcript.add(piece)
        assert new is not None
        shown.add(new)
    out, err = capsys.readouterr()
    assert out == "Once upon\nOne"
    assert err.count("begins again") == err.count("attempt 2") == 1


def test_a_result_of_an_attempt_that_was_not_received_does_not_go_on_with_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown, transcript = TextPrinter(), Transcript()
    for piece in (Piece("a", 1, 0, 0, "Once"), Piece("a", 2, 1, 0, "Two")):
        assert transcript.add(piece) is not None
        shown.add(piece)
    shown.end(transcript, "completed", {0: "One", 1: "Two"})
    assert capsys.readouterr().out == "Once\nOne\n"

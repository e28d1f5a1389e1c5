"""The text of a request while it is written: pieces in, what is new out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from contract.streaming import Piece, Transcript


class Texts:
    """What was sent of each choice, and what its latest attempt has written.

    A request that runs again writes a text of its own. What was sent stays sent: its text goes on
    once it has caught up with that, if it begins with the same words.
    """

    def __init__(self) -> None:
        self.sent: dict[int, str] = {}
        self._written = Transcript()

    def take(self, pieces: Iterable[Piece]) -> Iterator[tuple[int, str]]:
        """Yield (choice, text) to be sent now; where a piece is missing, the result has it."""
        changed = dict.fromkeys(p.choice for p in pieces if self._written.add(p) is not None)
        for choice in changed:
            sent, text = self.sent.get(choice, ""), self._written.texts.get(choice, "")
            if len(text) > len(sent) and text.startswith(sent):
                self.sent[choice] = text
                yield choice, text[len(sent) :]

    def continued_by(self, texts: dict[int, str]) -> bool:
        """Whether an answer's texts begin with what was sent."""
        return all(texts.get(n, "").startswith(sent) for n, sent in self.sent.items())

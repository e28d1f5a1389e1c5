"""Templates over columns: `Summarise: {text}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from producer.input.options import BadOption
from producer.input.tables.cells import text_of

#: `{{` and `}}` are braces, `{name}` is a column, whatever its name; any other brace is a mistake.
_PART = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


def is_template(text: str) -> bool:
    """Whether a text names columns in braces."""
    return any(found[1] for found in _PART.finditer(text))


@dataclass(frozen=True, slots=True)
class Template:
    """Texts and, each after the text of its place, the columns between them."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, field: str, text: str) -> Template:
        """Take a template apart.

        Raises:
            BadOption: a brace stands alone.
        """
        texts, columns, at = [""], [], 0
        for found in _PART.finditer(text):
            texts[-1] += text[at : found.start()]
            at = found.end()
            if found[1]:
                columns.append(found[1])
                texts.append("")
            elif len(found[0]) == 2:
                texts[-1] += found[0][0]
            else:
                raise BadOption(
                    f"template of {field}: a single {found[0]} at character {found.start() + 1}; "
                    f"write {found[0] * 2} for a brace, {{column}} for a column"
                )
        texts[-1] += text[at:]
        return cls(tuple(texts), tuple(columns))

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the text of one row.

        Raises:
            BadCell: a column has no value there.
        """
        parts = [self.texts[0]]
        for column, text in zip(self.columns, self.texts[1:], strict=True):
            parts += (text_of(column, row.get(column)), text)
        return "".join(parts)

"""The page's words: English texts are their own keys; other languages have a file each."""

from __future__ import annotations

from importlib.resources import files

import msgspec

LANGUAGES = {"en": "English", "ko": "한국어"}
_FOUND: dict[str, dict[str, str]] = {
    name: msgspec.json.decode(files(__package__).joinpath(f"{name}.json").read_bytes())
    for name in LANGUAGES
    if name != "en"
}
#: States are told by names that programs compare; people read them without underscores.
_SAID = {"in_progress": "in progress"}


def translated(language: str, text: str) -> str:
    """Return a text in a language; English where nobody has said it otherwise."""
    return _FOUND.get(language, {}).get(text) or _SAID.get(text, text)


def language_of(accepted: str) -> str:
    """Return the first of the languages of an Accept-Language header that there is."""
    for part in accepted.split(","):
        name = part.split(";")[0].strip().lower().partition("-")[0]
        if name in LANGUAGES:
            return name
    return "en"

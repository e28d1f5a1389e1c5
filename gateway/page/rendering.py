"""Templates: every text that comes from outside is escaped, and no page has a script inside. The
page's words, too: English texts are their own keys, other languages have a file each."""

from __future__ import annotations

import datetime as dt
import hashlib
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

#: Nothing inline, nothing from elsewhere, in nobody's frame.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def _assets() -> dict[str, tuple[str, bytes]]:
    """Return the assets by name: type and content; they are all there is, and small."""
    found = {}
    for entry in files(__package__).joinpath("assets").iterdir():
        media = _TYPES.get("." + entry.name.rpartition(".")[2])
        if media:
            found[entry.name] = (media, entry.read_bytes())
    return found


ASSETS = _assets()
#: In each asset's address: one that changes is fetched anew, and none is asked for twice.
#: Modules import each other by relative names, so all have the same.
VERSION = hashlib.sha256(b"".join(c for _, (_, c) in sorted(ASSETS.items()))).hexdigest()[:12]


LANGUAGES = {"en": "English", "ko": "한국어"}
_FOUND: dict[str, dict[str, str]] = {
    name: msgspec.json.decode(files(__package__).joinpath("words", f"{name}.json").read_bytes())
    for name in LANGUAGES
    if name != "en"
}
#: States are told by names that programs compare; people read them without underscores.
_SAID = {"in_progress": "in progress"}


def translate(language: str, text: str) -> str:
    """Return a text in a language; English where nobody has said it otherwise."""
    return _FOUND.get(language, {}).get(text) or _SAID.get(text, text)


def language_of(accepted: str) -> str:
    """Return the first of the languages of an Accept-Language header that there is."""
    for part in accepted.split(","):
        name = part.split(";")[0].strip().lower().partition("-")[0]
        if name in LANGUAGES:
            return name
    return "en"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 10 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.2g}"


def _when(seconds: float | None) -> str | Markup:
    """Return a moment as UTC; the viewer's zone replaces it, in the same width."""
    if not seconds:
        return "–"
    at = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def _clock(seconds: float) -> Markup:
    """Return an hour and minute as UTC; the viewer's zone replaces it."""
    at = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return Markup('<time datetime="{}" data-short>{}</time>').format(
        at.isoformat(), at.strftime("%H:%M")
    )


def duration(seconds: float | None) -> str:
    """Return a length of time as its two largest units, `–` if unknown."""
    if seconds is None:
        return "–"
    left = max(0, round(seconds))
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
        elif parts:
            break
    return " ".join(parts[:2])


def _size(count: float | None) -> str:
    value = float(count or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return ""


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("gateway.page"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "number": _number, "when": _when, "duration": duration, "size": _size, "clock": _clock,
}  # fmt: skip
_ENVIRONMENT.globals |= {"percent": _percent, "asset": lambda name: f"/ui/assets/{VERSION}/{name}"}


def render(template: str, language: str, **context: Any) -> str:
    """Return a page. `_` in a template says a text in the page's language; its fields are escaped
    with it."""

    def say(text: str, **fields: Any) -> str:
        told = translate(language, text)
        return told.format(**fields) if fields else told

    return _ENVIRONMENT.get_template(template).render(_=say, lang=language, **context)

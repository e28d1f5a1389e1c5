"""Renders the page's templates, translates their texts, and loads the page's assets.

Templates escape all text from outside, and no page has an inline script. An English text is the key
of its translations; each other language has a file in `translations`.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import math
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup, escape

#: The Content-Security-Policy: no inline scripts or styles, no other origins, no framing.
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
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
#: Name of each asset -> its media type and content.
ASSETS = {
    entry.name: (media, entry.read_bytes())
    for entry in files(__package__).joinpath("assets").iterdir()
    if (media := _TYPES.get(entry.name.rpartition(".")[2]))
}
#: Part of each asset's URL: browsers fetch a changed asset again, and never ask whether one has
#: changed. All assets share one version, because modules import each other by relative names.
VERSION = hashlib.sha256(b"".join(c for _, (_, c) in sorted(ASSETS.items()))).hexdigest()[:12]

LANGUAGES = {"en": "English", "ko": "한국어"}
_TRANSLATIONS: dict[str, dict[str, str]] = {
    "en": {"in_progress": "in progress"},
    "ko": msgspec.json.decode(
        files(__package__).joinpath("translations", "ko.json").read_bytes()
    ),
}  # fmt: skip


def translate(language: str, text: str) -> str:
    """Return a text in a language; unchanged if there is no translation."""
    return _TRANSLATIONS[language].get(text, text)


def language_of(accepted: str) -> str:
    """Return the first supported language of an Accept-Language header, else `en`."""
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


def between(low: float, high: float) -> str:
    """Return the bounds of a bin with as many digits as tell them apart."""
    if high <= low:
        return _number(low)
    digits = max(0, 1 - math.floor(math.log10(high - low)))
    return f"{low:,.{digits}f}–{high:,.{digits}f}"


def _when(seconds: float | None) -> str | Markup:
    """Return a time in UTC, which the browser replaces with local time."""
    return _time(seconds, "%Y-%m-%d %H:%M:%S UTC") if seconds else "–"


def _clock(seconds: float) -> Markup:
    """Return hour and minute in UTC; the browser replaces them with local time."""
    return _time(seconds, "%H:%M", " data-short")


def _time(seconds: float, form: str, attribute: str = "") -> Markup:
    at = dt.datetime.fromtimestamp(seconds, dt.UTC)
    html = Markup('<time datetime="{}"{}>{}</time>')
    return html.format(at.isoformat(), attribute, at.strftime(form))


def duration(seconds: float | None) -> str:
    """Return a length of time in its two largest units, `–` if unknown."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size} {unit}")
            left %= size
        elif parts:
            break
    return " ".join(parts[:2])


def _size(count: float | None) -> str:
    value = float(count or 0)
    if value < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB"):
        value /= 1000
        if value < 1000:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} GB"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _code(text: str) -> Markup:
    """Return a text as HTML, in which parts between backticks are code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(parts)))  # noqa: S704 - escaped


def _sentence(text: str) -> str:
    """Return a text with a capital letter, but not in the field with which it may begin."""
    return text[:1].upper() + text[1:]


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("gateway.page"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "number": _number, "when": _when, "duration": duration, "size": _size, "clock": _clock,
    "code": _code, "sentence": _sentence,
}  # fmt: skip
_ENVIRONMENT.globals |= {
    "percent": _percent, "between": between,
    "asset": lambda name: f"/ui/assets/{VERSION}/{name}",
}  # fmt: skip


def render(template: str, language: str, **context: Any) -> str:
    """Return a template's HTML; `_` in a template translates a text and formats it."""

    def translated(text: str, **fields: Any) -> str:
        translation = translate(language, text)
        return translation.format(**fields) if fields else translation

    return _ENVIRONMENT.get_template(template).render(_=translated, lang=language, **context)

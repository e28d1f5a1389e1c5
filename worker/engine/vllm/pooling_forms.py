"""Which embeddings and scores are plain, and which of them are of one form."""

from typing import Any

from contract.openai.pooling import EMBEDDINGS_URL, SCORE_URLS
from worker.engine.vllm.plans import as_key, is_text

#: Fields of bodies that a plan may have: what they do is the same for all texts.
SHARED = frozenset(("model", "user", "truncate_prompt_tokens", "truncation_side", "use_activation"))
EMBEDDED = SHARED | {"encoding_format", "dimensions", "add_special_tokens"}
#: The spellings of the two sides of a score.
PAIRED = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


def key_of(url: str, body: dict[str, Any]) -> bytes | None:
    """Return what is the same for all requests of a plain body's form; None if it is not plain."""
    names: tuple[str, ...]
    if url == EMBEDDINGS_URL:
        names, fields = ("input",), EMBEDDED
    elif url in SCORE_URLS:
        names = next((pair for pair in PAIRED if all(name in body for name in pair)), ())
        fields = SHARED
    else:
        return None
    rest = dict(body)
    given = [rest.pop(name, None) for name in names]
    texts = [_alone(value) for value in given]
    if not texts or not rest.keys() <= fields or not all(map(is_text, texts)):
        return None
    listed = [isinstance(value, list) for value in given]
    return as_key([url, names, listed, rest])


def _alone(value: Any) -> Any:
    """Return the one text of a list, as many clients send it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def texts_of(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the text, or the two, of a plain body."""
    if "input" in body:
        return (_alone(body["input"]),)
    first, second = next(pair for pair in PAIRED if all(name in body for name in pair))
    return _alone(body[first]), _alone(body[second])

"""Defines the body types of pooling models' endpoints: embeddings, scores, rerankings.

Field names are vLLM's (body.py has the reason). vLLM accepts several forms of one body, for example
`input` or `messages`. A body type here has the fields of all forms; FORMS has those of each form.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from contract.openai.amounts import MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS

#: Largest token id or count; engines use 32-bit numbers.
INT32_MAX = 2**31 - 1
Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
NonNegative = Annotated[int, Meta(ge=0, le=INT32_MAX)]
FromMinusOne = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
Text = Annotated[str, Meta(min_length=1)]
JsonObject = dict[str, Any]

#: Types of lists of token ids; AllowedTokens may have most tokens of a vocabulary.
FewTokens = Annotated[list[NonNegative], Meta(max_length=1024)]
AllowedTokens = Annotated[list[NonNegative], Meta(max_length=65_536)]
Tools = Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)]
LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)]


class Pooling(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of all requests to pooling models."""

    model: Text | None = None
    user: str | None = None
    truncate_prompt_tokens: FromMinusOne | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int64 | None = None
    mm_processor_kwargs: JsonObject | None = None
    cache_salt: CacheSalt | None = None
    use_activation: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    def __post_init__(self) -> None:
        """Require all fields of one form."""
        forms = FORMS[type(self)]
        if not any(all(getattr(self, name) is not None for name in form) for form in forms):
            missing = (name for form in forms for name in form if getattr(self, name) is None)
            raise ValueError(f"Object missing required field `{next(missing)}`")  # msgspec's words


class EmbeddingBody(Pooling, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/embeddings`: texts, token ids or messages; answers are JSON, never bytes."""

    input: (
        Text
        | Annotated[
            list[Text | NonNegative | JsonObject | list[NonNegative | JsonObject]],
            Meta(min_length=1),
        ]
        | None
    ) = None
    messages: (
        Annotated[list[JsonObject | list[JsonObject]], Meta(min_length=1, max_length=MAX_MESSAGES)]
        | None
    ) = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    media_io_kwargs: JsonObject | None = None


Scored = str | JsonObject
ScoredList = Scored | Annotated[list[Scored], Meta(max_length=MAX_PROMPTS)]


class Scoring(Pooling, forbid_unknown_fields=True, kw_only=True):
    """Fields of scores and rerankings."""

    max_tokens_per_query: NonNegative | None = None
    max_tokens_per_doc: NonNegative | None = None
    instruction: str | None = None
    documents: ScoredList | None = None


class ScoreBody(Scoring, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/score`: two sides to compare, in one of the forms in FORMS."""

    queries: ScoredList | None = None
    items: ScoredList | None = None
    data_1: ScoredList | None = None
    data_2: ScoredList | None = None
    text_1: ScoredList | None = None
    text_2: ScoredList | None = None


class RerankBody(Scoring, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/rerank`."""

    query: Scored | None = None
    top_n: NonNegative | None = None


EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URLS = ("/v1/score", "/score")
RERANK_URLS = ("/v1/rerank", "/v2/rerank", "/rerank")
POOLING_TYPES: dict[str, type[Struct]] = {
    EMBEDDINGS_URL: EmbeddingBody,
    **dict.fromkeys(SCORE_URLS, ScoreBody),
    **dict.fromkeys(RERANK_URLS, RerankBody),
}
#: Body type -> its forms; a body must have all fields of one form.
FORMS: dict[type[Struct], tuple[tuple[str, ...], ...]] = {
    EmbeddingBody: (("input",), ("messages",)),
    ScoreBody: (
        ("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")
    ),
    RerankBody: (("query", "documents"),),
}  # fmt: skip

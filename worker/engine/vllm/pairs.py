"""Tokens of the pairs of texts that a cross-encoder scores, many at once."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

Made = tuple[list[int], dict[str, Any] | None]


class Pairs:
    """One form's pairs.

    Args:
        processor: vLLM's CrossEncoderIOProcessor.
        asked: the ScoringRenderParams of the form's first pair.
    """

    def __init__(self, processor: Any, asked: Any) -> None:
        self._processor, self._asked = processor, asked
        more = ("supports_score_template", "model", "is_multimodal_model")
        #: vLLM does no more than to tokenize both texts. That is what it does with most models that
        #: write; for others its own method is called for each pair.
        self._plain = asked["chat_template"] is None and not any(
            getattr(processor, name, True) for name in more
        )

    def tokens(self, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Made | None]:
        """Return each pair's tokens and what its pooling parameters say more; None if refused.

        Called in vLLM's tokenizer thread.
        """
        made: list[Made | None] = [None] * len(pairs)
        joined = self._joined(tokenizer, pairs) if self._plain else None
        limits = self._asked["tok_params"]
        for place, pair in enumerate(pairs):
            with suppress(Exception):  # the full way tells its author
                if joined is None:
                    made[place] = self._rendered(pair)
                else:
                    cut = {"prompt_token_ids": joined[place]}
                    cut = limits.apply_post_tokenization(tokenizer, cut)
                    made[place] = cut["prompt_token_ids"], None
        return made

    def _joined(self, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Any:
        options = self._asked["tok_params"].get_encode_kwargs()
        if self._processor.use_sep_token:
            one, other = zip(*pairs, strict=True)
            made = tokenizer(text=list(one), text_pair=list(other), **options)
        else:
            made = tokenizer([one + other for one, other in pairs], **options)
        self._plain = "token_type_ids" not in made
        return made["input_ids"] if self._plain else None

    def _rendered(self, pair: tuple[str, str]) -> Made:
        first, second = pair
        made = self._processor.render({**self._asked, "data_1": first, "data_2": second})
        return made["prompts"]["prompt_token_ids"], made["params"].extra_kwargs

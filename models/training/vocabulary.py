"""The byte-level BPE tokenizer of the tiny model.

Every white-space character and every digit is a token of its own and no token crosses a word
boundary.  A name thus has the same tokens in the middle of a paragraph and at the start of an
answer, which makes copying it a matter of repeating tokens.
"""

import random

from prompt_forms import BEGIN, CHAT_TEMPLATE, END_OF_TURN, PAD, SPECIAL_TOKENS
from shards import draw_listed, draw_reading, render
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = Regex(r"\p{N}|\p{L}+|\s|[^\s\p{L}\p{N}]")


def train_tokenizer(seed: int, size: int, texts: int) -> PreTrainedTokenizerFast:
    """A tokenizer of that size, trained on freshly drawn training texts."""
    rng = random.Random(f"{seed}/tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    drawn = (
        "".join(text for text, _ in render(rng, draw(rng)))
        for _ in range(texts)
        for draw in (draw_listed, draw_reading)
    )
    tokenizer.train_from_iterator(drawn, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, begin)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast

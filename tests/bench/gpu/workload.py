"""What is run on the GPU: model shapes with random weights, and requests of mixed lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.openai.body import COMPLETION_URL
from contract.openai.pooling import EMBEDDINGS_URL, SCORE_URLS

VOCABULARY = 128_256
COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
#: Llama 3 8B and Llama 3.2 1B, as their config.json has them.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "head_dim": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip
#: What pairs.py's --pooling may be, and its engine's arguments: embeddings whose numbers are
#: written out or in base64, and scores of two texts of an embedding model.
POOLING = ("embed", "base64", "score")
POOLING_ENGINE = {"runner": "pooling", "convert": "embed"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_model(folder: Path, shape: str) -> Path:
    """Write config.json and a tokenizer of full size; the weights are left to `dummy` loading.

    The tokenizer has random pieces and no merges: a letter is a token on the way
    in, a piece of 3 to 8 letters on the way out, so that detokenizing costs what it
    does with a real vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    rng = random.Random(7)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece: number for number, piece in enumerate(alphabet)}
    while len(pieces) < VOCABULARY - 258:
        word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8)))
        pieces.setdefault(("\u0120" if rng.random() < 0.6 else "") + word, len(pieces))
    while len(pieces) < VOCABULARY:
        pieces[f"<|r{len(pieces)}|>"] = len(pieces)
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {number: piece for piece, number in pieces.items()}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": names[COMMON["bos_token_id"]],
            "eos_token": names[COMMON["eos_token_id"]],
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
        })
    )  # fmt: skip
    return folder


def weights_bytes(shape: str) -> int:
    """Return the bytes of a shape's weights in bfloat16, of which no file exists."""
    model = COMMON | SHAPES[shape]
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    queries, keys = (model[f"num_{kind}_heads"] * model["head_dim"]
                     for kind in ("attention", "key_value"))  # fmt: skip
    layer = hidden * (2 * queries + 2 * keys + 3 * inner + 2)
    tables = model["vocab_size"] * hidden * (1 if model["tie_word_embeddings"] else 2)
    return int(2 * (model["num_hidden_layers"] * layer + tables + hidden))


def requests(
    count: int, tokens: Sequence[int] = (16, 256), letters: Sequence[int] = (64, 512)
) -> list[tuple[str, int]]:
    """Return prompts of so many letters, each a token, with numbers of output tokens: two bounds
    each."""
    rng = random.Random(1234)
    low, high = tokens
    return [
        ("".join(rng.choices(LETTERS, k=rng.randint(*letters))), rng.randint(low, high))
        for _ in range(count)
    ]


def url(pooling: str | None) -> str:
    """Return where requests go."""
    if pooling is None:
        return COMPLETION_URL
    return SCORE_URLS[0] if pooling == "score" else EMBEDDINGS_URL


def sides(text: str) -> tuple[str, str]:
    """Return the halves of a text, of which a score is made."""
    return text[: len(text) // 2], text[len(text) // 2 :]


def body(request: tuple[str, int], pooling: str | None = None) -> dict[str, Any]:
    """Return a request as its line in a file has it: greedy, of exactly so many tokens."""
    prompt, tokens = request
    if pooling == "score":
        return dict(zip(("text_1", "text_2"), sides(prompt), strict=True))
    if pooling is not None:
        return {"input": prompt} | ({"encoding_format": pooling} if pooling == "base64" else {})
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

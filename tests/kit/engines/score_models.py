"""Checkpoints that score a pair of texts, small and random: a BERT that reads both with types of
tokens, and the shipped model as a reranker that reads both as one text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from demo.stack import MODEL

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIGNS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=?!.,:;'\"()한국의수도는"


def make_cross_encoder(folder: Path, seed: int = 1) -> Path:
    """Write a BERT for scores, whose tokens are single signs."""
    pieces = [*MARKS, *SIGNS, *(f"##{sign}" for sign in SIGNS)]
    names = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(names, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, names[mark]) for mark in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=2048,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=2048, num_labels=1, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_untyped_cross_encoder(folder: Path) -> Path:
    """The same, whose tokenizer does not tell of types: as models made after RoBERTa are."""
    make_cross_encoder(folder)
    written = folder / "tokenizer_config.json"
    config = json.loads(written.read_text())
    written.write_text(json.dumps(config | {"model_input_names": ["input_ids", "attention_mask"]}))
    return folder


def make_reranker(folder: Path, seed: int = 1) -> Path:
    """Write the shipped model with one number, from a seed, in place of its next token."""
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(seed)
    weights["score.weight"] = torch.randn(1, config["hidden_size"], dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""Train the tiny model from nothing: tokenizer, data and weights from one seed.

python models/training/train.py --out models/tiny --device cuda
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from prompt_forms import ANSWER, CONTEXT, END_OF_TEXT, END_OF_TURN, chat_text
from shards import Block, ShardPlan, stream
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from vocabulary import train_tokenizer

LEARNING_RATE = 2e-3
CONTEXT_WEIGHT = 0.1


def parse_arguments() -> argparse.Namespace:
    """The command line; the model card names what was used for `models/tiny`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--texts", type=int, default=20_000, help="for the tokenizer")
    parser.add_argument("--short-rows", type=int, default=256)
    parser.add_argument("--long-rows", type=int, default=512)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--compile", action="store_true", help="needs a C compiler")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="let the schedule end by the clock, 0 for never"
    )
    return parser.parse_args()


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Head counts are even and head size 64, which every attention kernel takes."""
    ends = [tokenizer.convert_tokens_to_ids(END_OF_TEXT), tokenizer.eos_token_id]
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )


def weighted_loss(
    logits: Tensor, tokens: Tensor, roles: Tensor, context_weight: float
) -> tuple[Tensor, Tensor]:
    """Sum of the weighted losses of a block, and the sum of the weights."""
    wanted = tokens[:, 1:]
    weights = (roles[:, 1:] == ANSWER).float() + context_weight * (roles[:, 1:] == CONTEXT).float()
    losses = cross_entropy(
        logits[:, :-1].float().flatten(0, 1), wanted.flatten(), reduction="none"
    ).view_as(weights)
    return (losses * weights).sum(), weights.sum()


@torch.no_grad()  # type: ignore[untyped-decorator]
def share_exact(logits: Tensor, tokens: Tensor, roles: Tensor) -> float:
    """Share of rows whose answer tokens are all guessed, given the right text before each."""
    wrong = (logits[:, :-1].argmax(-1) != tokens[:, 1:]) & (roles[:, 1:] == ANSWER)
    return float((~wrong.any(-1)).float().mean())


def learning_rate(progress: float) -> float:
    """Factor on the learning rate: a short linear rise, then half a cosine to almost nothing."""
    return min(progress / 0.03, 1.0) * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * progress)))


def to_device(block: Block, device: str) -> tuple[Tensor, Tensor]:
    """A block's tokens and roles as tensors where the model is."""
    tokens, roles = (torch.from_numpy(part).to(device, non_blocking=True) for part in block)
    return tokens.long(), roles


def fit(
    model: LlamaForCausalLM, shards: Iterator[tuple[Block, Block]], options: argparse.Namespace
) -> None:
    """Run the training steps; progress goes to standard output."""
    device = options.device
    forward = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05
    )
    started = time.monotonic()
    progress = 0.0
    for step, shard in enumerate(shards):
        spent = (time.monotonic() - started) / 60
        progress = step / options.steps
        if options.minutes:
            progress = max(progress, spent / options.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * learning_rate(progress)
        exact, sums, total = [], [], torch.zeros((), device=device)
        for block in shard:
            tokens, roles = to_device(block, device)
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                logits = forward(input_ids=tokens, use_cache=False).logits
            loss, weight = weighted_loss(logits, tokens, roles, CONTEXT_WEIGHT * (1 - progress))
            sums.append(loss)
            total = total + weight
            if step % 250 == 0:
                exact.append(share_exact(logits, tokens, roles))
        mean = sum(sums, start=torch.zeros((), device=device)) / total
        optimizer.zero_grad(set_to_none=True)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if exact:
            shares = " ".join(f"{share:.3f}" for share in exact)
            print(
                f"step {step} {spent:.1f} min loss {float(mean.detach()):.4f} exact {shares}",
                flush=True,
            )


def main() -> None:
    """Tokenizer, training, then everything saved as one Hugging Face folder."""
    options = parse_arguments()
    tokenizer = train_tokenizer(options.seed, size=1024, texts=options.texts)
    tokenizer.save_pretrained(options.out)
    greeting = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "3 + 4 = ?"}]
    templated = tokenizer.apply_chat_template(greeting, tokenize=False, add_generation_prompt=True)
    if templated != chat_text(greeting):
        raise SystemExit("the chat template and the training text differ")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model = LlamaForCausalLM(build_config(tokenizer)).to(options.device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {END_OF_TURN} ends a turn")
    plan = ShardPlan(
        options.out / "tokenizer.json", options.seed, options.short_rows, options.long_rows
    )
    fit(model, stream(plan, options.steps, options.workers), options)
    model.to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()

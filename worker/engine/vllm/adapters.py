"""LoRA adapters as `vllm serve --lora-modules` names them: a line chooses one by `model`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from worker.engine.rbln.rules import wishes
from worker.machine.finding import Finding
from worker.setting_types import engine_words

#: vLLM's own --max-lora-rank where none is given.
MAX_RANK = 16
#: What it takes.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@cache
def adapters(engine_args: str) -> dict[str, str]:
    """Return the folders of the adapters by name; what is no `name=path` is left to vLLM."""
    found: dict[str, str] = {}
    listing = False
    for word in engine_words(engine_args):
        module = word
        if word.startswith("-"):
            option, _, module = word.partition("=")
            listing = option.replace("_", "-") == "--lora-modules"
        name, path = _named(module) if listing else ("", "")
        found |= {name: path} if name else {}
    return found


def _named(word: str) -> tuple[str, str]:
    if not word.startswith("{"):
        name, _, path = word.partition("=")
        return (name, path) if path else ("", "")
    try:
        module = json.loads(word)
        return str(module["name"]), str(module["path"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def judge_adapters(engine_args: str) -> Iterator[Finding]:
    """Say which adapters cannot be loaded; vLLM would say so only after the model is."""
    asked = wishes(engine_args)
    modules = adapters(engine_args)
    if modules and "enable-lora" not in asked:
        yield Finding(
            "WARMQ_ENGINE_ARGS: --lora-modules without --enable-lora", "Add --enable-lora"
        )
    most = asked.get("max-lora-rank", "")
    for name, path in modules.items():
        yield from _judge(name, path, int(most) if most.isdecimal() else MAX_RANK)


def _judge(name: str, path: str, most: int) -> Iterator[Finding]:
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        if path.startswith(("/", ".", "~")):
            yield Finding(
                f"WARMQ_ENGINE_ARGS: the adapter {name} has no {file}",
                "Name the folder that PEFT's save_pretrained() wrote",
            )
        return
    try:
        rank = json.loads(file.read_text("utf-8")).get("r")
    except (OSError, ValueError, AttributeError) as error:
        yield Finding(f"WARMQ_ENGINE_ARGS: {file} cannot be read: {error}", "Save the adapter anew")
        return
    if isinstance(rank, int) and rank > most:
        yield Finding(
            f"WARMQ_ENGINE_ARGS: the adapter {name} has rank {rank}, and --max-lora-rank is {most}",
            f"Write --max-lora-rank {next((r for r in RANKS if r >= rank), rank)}",
        )

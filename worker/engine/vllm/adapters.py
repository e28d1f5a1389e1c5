"""LoRA adapters as `vllm serve --lora-modules` names them: a line chooses one by `model`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from worker.engine.engine_args import EngineArgs
from worker.machine.finding import Finding

#: vLLM's own --max-lora-rank where none is given.
MAX_RANK = 16
#: What it takes.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def judge_adapters(args: EngineArgs) -> Iterator[Finding]:
    """Say which adapters cannot be loaded; vLLM would say so only after the model is."""
    if args.adapters and "enable-lora" not in args.options:
        yield Finding(
            "WARMQ_ENGINE_ARGS: --lora-modules without --enable-lora", "Add --enable-lora"
        )
    most = args.options.get("max-lora-rank", "")
    for name, path in args.adapters.items():
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

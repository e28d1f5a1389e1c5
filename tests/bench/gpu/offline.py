"""`LLM.generate`, `embed` or `score` in a process of its own, told over a socket what to run."""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from bench.gpu import schemas, workload


def main() -> None:
    """Build the engine, then answer each ask with the seconds that it took."""
    address, engine = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams

    llm = LLM(**engine)
    with Client(address) as line:
        line.send("ready")
        while ask := line.recv():
            if "schemas" in ask:
                line.send(bound(llm, SamplingParams, ask))
            elif ask.get("pooling"):
                line.send(pool(llm, ask))
            else:
                line.send(generate(llm, SamplingParams, ask))


def generate(llm: Any, sampling: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """Run all requests at once, as a script around vLLM does."""
    if "file" in ask:
        wanted = [tuple(one) for one in json.loads(Path(ask["file"]).read_text())]
    else:
        wanted = workload.requests(ask["count"], ask["tokens"], ask["letters"])
    prompts = [prompt for prompt, _ in wanted]
    params = [sampling(temperature=0, ignore_eos=True, max_tokens=n) for _, n in wanted]
    began, cpu = time.perf_counter(), time.process_time()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(
        len(answer.outputs[0].token_ids) == n for answer, (_, n) in zip(done, wanted, strict=True)
    )
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu,
        "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in done),
        "cached_tokens": sum(answer.num_cached_tokens or 0 for answer in done),
    }


def bound(llm: Any, sampling: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """Run all requests at once, with the answers bound to JSON schemas."""
    from vllm.sampling_params import StructuredOutputsParams

    fields, numbers = ask["fields"], range(1, ask["count"] + 1)
    made = schemas.schemas_of(fields, ask["schemas"], ask["run"], ask["mixed"])
    prompts = [schemas.prompt(number) for number in numbers]
    began, cpu = time.perf_counter(), time.process_time()
    params = [
        sampling(
            temperature=0, max_tokens=schemas.MOST[fields],
            structured_outputs=StructuredOutputsParams(json=made[number % len(made)]),
        ) for number in numbers
    ]  # fmt: skip
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu,
        "tokens": sum(len(answer.outputs[0].token_ids) for answer in done),
        "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in done),
        "cut": sum(answer.outputs[0].finish_reason == "length" for answer in done),
        "sample": done[0].outputs[0].text[:200],
    }


def pool(llm: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """Embed, or score, all texts at once, as a script around vLLM does."""
    texts = [text for text, _ in workload.requests(ask["count"], ask["tokens"], ask["letters"])]
    began, cpu = time.perf_counter(), time.process_time()
    if ask["pooling"] == "score":
        one, other = zip(*map(workload.sides, texts), strict=True)
        done = llm.score(list(one), list(other), use_tqdm=False)
        numbers = [answer.outputs.score for answer in done]
    else:
        done = llm.embed(texts, use_tqdm=False)
        numbers = [answer.outputs.embedding[0] for answer in done]
    seconds = time.perf_counter() - began
    assert len(numbers) == len(texts)
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu,
        "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in done),
        "sum": sum(numbers),
    }


if __name__ == "__main__":
    main()

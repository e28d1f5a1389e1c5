"""One file through Ray Data LLM, as its manual's example does it; prints the tokens generated.

Run in the environment of requirements/ray.txt, the repository in PYTHONPATH: ray_batch.py COUNT
"""

from __future__ import annotations

import sys

import ray
from bench.peers.ways import ENGINE_KEYWORDS, TOKENS, body
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

from demo.stack import MODEL


def main(count: int) -> None:
    """Answer `count` chats."""
    ray.init(num_cpus=2, include_dashboard=False)
    config = vLLMEngineProcessorConfig(
        model_source=str(MODEL), engine_kwargs=ENGINE_KEYWORDS, concurrency=1, batch_size=64,
        # Without it the stage asks for a GPU; its metrics need a package of Ray's dashboard.
        placement_group_config={"bundles": [{"CPU": 1}]}, log_engine_metrics=False,
    )  # fmt: skip
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    processor = build_processor(
        config,
        preprocess=lambda row: {"messages": row["messages"], "sampling_params": sampling},
        postprocess=lambda row: {"tokens": row["num_generated_tokens"]},
    )
    chats = ray.data.from_items([{"messages": body(n)["messages"]} for n in range(count)])
    rows = processor(chats).take_all()
    print("generated", sum(row["tokens"] for row in rows), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

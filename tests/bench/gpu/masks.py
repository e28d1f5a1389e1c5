"""A plugin of vLLM's engine process, for structured.py: times masks, and sets a thread's share.

vLLM computes before each step which tokens a request that is bound to a schema may have next. With
more than 128 such requests it gives `CHUNK` neighbours each to a few threads
(vllm/v1/structured_output/__init__.py); the worker's plugin makes it fewer.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

#: vLLM's own.
CHUNK = 16
#: The environment variable with the file that has an engine's figures; FILE.chunk has its chunk.
FILE = "BENCH_MASKS"


def write_plugin(folder: Path) -> Path:
    """Write the distribution whose entry point vLLM calls; it has to be in PYTHONPATH."""
    found = folder / "plugin"
    about = found / "bench_masks-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-masks\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nmasks = bench.gpu.masks:install\n"
    (about / "entry_points.txt").write_text(entry)
    return found


def install() -> None:
    """Replace the function that computes the masks of a step by one that is timed."""
    from vllm.v1.structured_output import StructuredOutputManager

    original = StructuredOutputManager.grammar_bitmask
    if original.__name__ == "timed":
        return
    file = Path(os.environ[FILE])
    chunk = file.with_suffix(".chunk")
    found = {"mask_s": 0.0, "mask_steps": 0}

    def timed(manager: Any, *args: Any, **kwargs: Any) -> Any:
        # The worker's plugin has a property there.
        type(manager).fill_bitmask_parallel_batch_size = int(chunk.read_text())
        vars(manager).pop("fill_bitmask_parallel_batch_size", None)
        began = time.perf_counter()
        masks = original(manager, *args, **kwargs)
        if masks is not None:
            found["mask_s"] += time.perf_counter() - began
            found["mask_steps"] += 1
            file.write_text(json.dumps(found))
        return masks

    StructuredOutputManager.grammar_bitmask = timed  # type: ignore[method-assign]


class Masks:
    """What the engines' plugins have written; `folder` is the folder of their files."""

    def __init__(self, folder: Path) -> None:
        """Prepare."""
        self._folder = folder

    def set_chunk(self, engine: str, chunk: int) -> None:
        """Set how many neighbours a thread computes, from the next step on."""
        (self._folder / f"{engine}.chunk").write_text(str(chunk))

    def env(self, engine: str) -> dict[str, str]:
        """Return the environment variable of one engine, which starts with vLLM's own chunk."""
        self.set_chunk(engine, CHUNK)
        return {FILE: str(self._folder / engine)}

    def read(self, engine: str) -> dict[str, float]:
        """Return the engine's sums since its start: seconds, and steps."""
        found: dict[str, float] = json.loads((self._folder / engine).read_text())
        return found

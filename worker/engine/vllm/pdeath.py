"""The vLLM plugin that sets up each engine process: log, calls, masks, parent's death.

vLLM loads it by its entry point in `vllm.general_plugins`.

EngineCore survives a SIGKILL of its parent, and keeps the device (seen with 0.30 and 0.32, still
alive after 40 s). worker/engine/parent_death.py prevents this before vLLM is imported; this plugin
does the same for processes that were started in another way. The kernel sends its signal when the
thread that started the process ends, so the worker builds its engine in one thread, which lives as
long as the worker.

The kernel frees the device of a killed process. But a killed RBLN engine may leave its card
unusable, so it gets SIGTERM, and SIGKILL only after a long time (worker/engine/rbln/rules.py).
"""

import multiprocessing

from worker.engine.parent_death import end_engine_with_parent
from worker.engine.vllm.processes import add_abort_call, copy_warnings, quieten, share_masks


def register() -> None:
    """Set up an engine process. In the worker, only filter vLLM's log."""
    quieten()
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    copy_warnings()
    add_abort_call()
    share_masks()
    end_engine_with_parent(parent.pid)

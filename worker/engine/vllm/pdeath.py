"""A vLLM plugin (`vllm.general_plugins`) that sets up each process that vLLM starts.

EngineCore survives a SIGKILL of its parent and would keep the device (seen on 0.30 and 0.32, still
alive after 40 s). worker/engine/parent_death.py ends it with its parent before vLLM is imported;
a process that was started in another way is set up here. The signal follows the thread that started
the process, so the worker builds its engine in one thread that lives as long as the worker.

The kernel frees the device of a killed process, but a killed RBLN engine may leave its card
unusable: it gets SIGTERM, and SIGKILL after a long grace (worker/engine/rbln/rules.py).
"""

import multiprocessing

from worker.engine.parent_death import end_engine_with_parent
from worker.engine.vllm.processes import add_abort_call, copy_errors, quieten


def register() -> None:
    """Set up this engine process; in the worker only make vLLM's log quieter."""
    quieten()
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    copy_errors()
    add_abort_call()
    end_engine_with_parent(parent.pid)

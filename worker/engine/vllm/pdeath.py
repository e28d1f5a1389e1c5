"""A vLLM plugin: what this worker needs in each process that vLLM starts.

vLLM loads this entry point (`vllm.general_plugins`) there. EngineCore survives a SIGKILL of its
parent and would hold the device for ever (seen on 0.30 and 0.32, still alive after 40 s): it was
tied to its parent before its first line of vLLM (worker/engine/parent_death.py), and one that
was started in a way that is not known there is tied here. The worker builds its engine in one
thread that lives
as long as the process, for the signal follows that thread.

The kernel frees the device of a killed process. Not so on RBLN, where a killed engine may leave its
card unusable: there it gets SIGTERM, and SIGKILL only after a long grace
(worker/engine/rbln/rules.py sets it).
"""

import multiprocessing

from worker.engine.parent_death import end_engine_with_parent
from worker.engine.vllm.processes import add_abort_call, copy_errors, quieten


def register() -> None:
    """Set up this engine process; the worker itself only gets a quieter log."""
    quieten()
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    copy_errors()
    add_abort_call()
    end_engine_with_parent(parent.pid)

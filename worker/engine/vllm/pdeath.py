"""A vLLM plugin: engine processes die with the worker that owns them.

vLLM's EngineCore survives a SIGKILL of its parent and would hold the device for
ever (seen on 0.30 and 0.32, still alive after 40 s). vLLM loads this entry point
(`vllm.general_plugins`) in every process it starts. The signal follows the
THREAD that created the process, so the worker builds its engine in one thread
that lives as long as the process.

It is SIGKILL: EngineCore answers SIGTERM between two steps, so one that hangs, or is
stopped, would outlive its owner. The kernel frees the device of a killed process.
Not so on RBLN, where a killed engine may leave its card unusable: there it is SIGTERM,
and SIGKILL only after a long grace (worker/engine/rbln/start.py sets it).
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import time

from worker.engine.end import ASK_FIRST_ENV
from worker.engine.vllm import vacated
from worker.engine.vllm.quiet import quieten
from worker.engine.vllm.root_cause import copy_errors

PR_SET_PDEATHSIG = 1


def register() -> None:
    """Tie this engine process to its parent; the worker itself only gets a quieter log."""
    quieten()
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    copy_errors()
    vacated.register()
    grace = os.environ.get(ASK_FIRST_ENV)
    how = signal.SIGKILL if grace is None else signal.SIGTERM
    if grace is not None:
        insist = threading.Thread(target=_insist, args=(parent.pid, float(grace)), daemon=True)
        insist.start()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent.pid:
        # The parent died before we asked: nobody will signal us any more.
        os.kill(os.getpid(), how)


def _insist(parent: int, grace_s: float) -> None:
    """Kill this process if it has not ended so long after its parent."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)

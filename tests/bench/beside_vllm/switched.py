"""vLLM's scheduler with a policy that changes while no request runs, for policy.py.

On a CPU vLLM does not schedule asynchronously.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler


class SwitchedScheduler(Scheduler):
    """Changes its policy with each reset of the prefix cache, a call that EngineCore has."""

    def reset_prefix_cache(self, to_priority: bool = False, *_: Any) -> bool:
        """Use the policy `priority` or `fcfs` from now on."""
        assert not self.requests
        policy = SchedulingPolicy.PRIORITY if to_priority else SchedulingPolicy.FCFS
        self.policy = policy
        self.waiting = create_request_queue(policy)
        self.skipped_waiting = create_request_queue(policy)
        return bool(super().reset_prefix_cache())

"""Statistics and spans of sampled requests, around an OutputProcessor of each release's form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine.vllm.stats import TRACE, trace_requests

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds


class Processor:
    """vLLM's OutputProcessor, as far as tracing uses it; records the statistics of each step."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.tracing_enabled = self.log_stats = False
        self.steps: list[tuple[Any, Any, Any]] = []

    def add_request(self, request: Any, prompt: Any) -> None:
        self.request_states[request.request_id] = SimpleNamespace(stats=self.log_stats or None)

    def process_outputs(
        self, outputs: Any, timestamp: Any = None, stats: Any = None, weight_version: Any = None
    ) -> None:
        self.steps.append((outputs, stats, weight_version))

    def do_tracing(self, output: Any, state: Any, stats: Any) -> None: ...
    def _update_stats_from_output(self, state: Any, *args: Any) -> None: ...
    def _update_stats_from_finished(self, state: Any, *args: Any) -> None: ...


def test_a_step_has_statistics_only_while_a_sampled_request_runs_in_each_releases_way() -> None:
    processor: Any = Processor()
    trace_requests(SimpleNamespace(output_processor=processor))
    assert processor.tracing_enabled
    for name, headers in (("plain", None), ("sampled", {"traceparent": "00"})):
        TRACE.set(headers)
        processor.add_request(SimpleNamespace(request_id=name), "x")
        processor.process_outputs([name], 1.0, None)  # vLLM 0.30
        processor.process_outputs([name], 1.0, None, weight_version="7")  # since vLLM 0.32
    assert [state.stats for state in processor.request_states.values()] == [None, True]
    del processor.request_states["sampled"]
    processor.process_outputs([], 1.0, None)
    seen = [(outputs, stats is not None, version) for outputs, stats, version in processor.steps]
    assert seen == [
        (["plain"], False, None), (["plain"], False, "7"),
        (["sampled"], True, None), (["sampled"], True, "7"), ([], False, None),
    ]  # fmt: skip

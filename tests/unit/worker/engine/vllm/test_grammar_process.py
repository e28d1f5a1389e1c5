"""Constraints are compiled with the backend that each needs, also where vLLM allows only one."""

from __future__ import annotations

import inspect
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from demo.stack import MODEL
from worker.engine.vllm import grammar_process
from worker.engine.vllm.grammar_process import Compiler

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds
PLAIN = {"type": "object", "properties": {"odd": {"type": "boolean"}}}
FOR_GUIDANCE = {"type": "integer", "multipleOf": 3}  # xgrammar cannot express it


class Manager:
    """vLLM's StructuredOutputManager since 0.33: it refuses a second backend."""

    def __init__(self, config: Any) -> None:
        self.backend: Any = None
        self.backend_name: str | None = None
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.compiled: list[tuple[str, str]] = []

    def grammar_init(self, request: Any) -> None:
        name = request.sampling_params.structured_outputs._backend
        if self.backend_name is not None and name != self.backend_name:
            raise ValueError(f"the engine is already using {self.backend_name}")
        if self.backend is None:
            self.backend = SimpleNamespace(name=name, allocate_token_bitmask=lambda size: [])
            self.backend_name = name
        self.compiled.append((name, self.backend.name))
        grammar = SimpleNamespace(is_terminated=lambda: True)
        request.structured_output_request.grammar = grammar


def test_constraints_for_different_backends_are_compiled_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    monkeypatch.setattr("vllm.v1.structured_output.StructuredOutputManager", Manager)
    monkeypatch.setattr(grammar_process, "_remaining_s", [3600.0])  # of this process
    chosen = SimpleNamespace(
        backend="auto", disable_any_whitespace=False, disable_additional_properties=False,
        reasoning_parser="",
    )  # fmt: skip
    model = SimpleNamespace(is_diffusion=False)
    compiler = Compiler(SimpleNamespace(model_config=model, structured_outputs_config=chosen))
    backends = []
    for schema in (PLAIN, FOR_GUIDANCE, PLAIN):
        answer = compiler.answer(StructuredOutputsParams(json=json.dumps(schema)))
        assert answer[0] == "valid", answer
        backends.append(answer[1]["_backend"])
    assert backends == ["xgrammar", "guidance", "xgrammar"]
    compiled = compiler._manager.compiled
    assert all(wanted == used for wanted, used in compiled)
    assert {name for name, _ in compiled} == {"xgrammar", "guidance"}


def test_vllm_notes_its_backend_only_where_the_compiler_sets_it() -> None:
    from vllm.v1.structured_output import StructuredOutputManager as VllmsManager

    noted = re.findall(r"self\.(\w+) = ", inspect.getsource(VllmsManager.grammar_init))
    assert set(noted) - {"backend", "backend_name"} == set()
    assert "_use_async_grammar_compilation" in inspect.getsource(VllmsManager)

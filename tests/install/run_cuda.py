"""Install the CUDA lock in full and see what it does without a driver: `make test-cuda-install`.

    run_cuda.py [--save]

Makes .venv-cuda anew from the locks (4 GB of downloads, 9 GB on disk), checks that it is whole,
imports it, and lets `worker.check` and a worker say that NVIDIA's driver is missing. On a machine
that has a driver, the last two must not say so. --save keeps what was seen in cuda.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv-cuda"
PYTHON = VENV / "bin" / "python"
SEEN = Path(__file__).with_name("cuda.json")
STOP_S = 120
MISSING = "no NVIDIA driver is found"
IMPORTS = """
import json, torch, vllm, vllm._version, flashinfer, triton, torchvision, torchaudio, xgrammar
from worker.machine import devices
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__,
                  "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
                  "driver": devices.nvidia_driver()}))
"""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings of warmq."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WARMQ_")}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    return clean | offline | more


def run(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; its output is text, in one piece."""
    return subprocess.run(
        words, cwd=ROOT, env=environment(**more), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600,
    )  # fmt: skip


def install() -> float:
    """Make the environment anew; return the seconds that it took."""
    shutil.rmtree(VENV, ignore_errors=True)
    began = time.monotonic()
    done = run(ROOT / "scripts" / "setup", VENV=str(VENV), DEVICE="cuda")
    if done.returncode:
        sys.exit(done.stdout)
    return time.monotonic() - began


def started(folder: Path) -> tuple[int | None, str]:
    """Start a worker beside a Redis; return its exit status (None: it runs) and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = VENV / "bin" / "redis-server"
    command = [server, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    log = folder / "worker.log"
    procfile = (ROOT / "Procfile").read_text().partition("worker:")[2].splitlines()[0].split()
    settings = {
        "WARMQ_REDIS_URL": f"redis://127.0.0.1:{port}/0",
        "WARMQ_MODEL": str(ROOT / "models" / "tiny"),
        "WARMQ_ENGINE_ARGS": "--max-num-seqs 32 --enforce-eager --gpu-memory-utilization 0.2",
    }
    try:
        with log.open("wb") as file:
            worker = subprocess.Popen(
                [VENV / "bin" / procfile[0], *procfile[1:]],
                cwd=ROOT, env=environment(**settings), stdout=file, stderr=file,
            )  # fmt: skip
            try:
                worker.wait(STOP_S)
            except subprocess.TimeoutExpired:
                worker.terminate()
                worker.wait(STOP_S)
                return None, log.read_text()
        return worker.returncode, log.read_text()
    finally:
        redis.terminate()
        redis.wait()


def look() -> dict[str, Any]:
    """Return what was seen, by name."""
    seconds = install()
    whole = run(PYTHON, "-m", "pip", "check")
    imported = run(PYTHON, "-c", IMPORTS)
    if imported.returncode:
        sys.exit(imported.stdout)
    seen = json.loads(imported.stdout.splitlines()[-1])
    check = run(PYTHON, "-m", "worker.check", WARMQ_MODEL=str(ROOT / "models" / "tiny"))
    with tempfile.TemporaryDirectory() as folder:
        status, log = started(Path(folder))
    size = sum(f.lstat().st_size for f in VENV.rglob("*") if f.is_file() and not f.is_symlink())
    return seen | {
        "install_s": round(seconds),
        "gigabytes": round(size / 1e9, 1),
        "pip_check": whole.stdout.strip(),
        "check": [line for line in check.stdout.splitlines() if MISSING in line],
        "check_status": check.returncode,
        "start": [line.partition("] ")[2] for line in log.splitlines() if MISSING in line],
        "start_status": status,
        "tracebacks": (check.stdout + log).count("Traceback"),
    }


def main() -> int:
    """Look, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="keep what was seen in cuda.json")
    save = parser.parse_args().save
    seen = look()
    text = json.dumps(seen, indent=2) + "\n"
    sys.stdout.write(text)
    missing = seen["driver"] is None
    good = (
        seen["pip_check"] == "No broken requirements found."
        and seen["available"] is not missing
        and len(seen["check"]) == len(seen["start"]) == missing
        and (not missing or (seen["check_status"], seen["start_status"]) == (1, 1))
        and not seen["tracebacks"]
    )
    if good and save:
        SEEN.write_text(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

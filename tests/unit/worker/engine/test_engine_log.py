"""The file to which vLLM's log goes, and what of it also goes to the worker's log."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract.settings import SettingsError, load
from demo.stack import eventually
from worker.engine import engine_log
from worker.engine.engine_log import choose
from worker.engine.parent_death import ENGINE_LOG
from worker.engine.vllm import processes
from worker.engine.vllm_settings import VllmSettings
from worker.settings import WorkerSettings

#: A program that prints the file that is chosen without a setting; its argument is --logfile.
CHOOSES = """
import sys
from worker.engine.engine_log import choose
sys.stdout.write(choose(None, "text", (sys.argv[1:] or [None])[0]))
"""


def chosen(folder: Path, stderr: str | None, *logfile: str) -> str:
    """Return the file that a worker in this folder chooses, with its stderr in this file."""
    folder.mkdir(exist_ok=True)
    with open(folder / stderr if stderr else os.devnull, "ab") as err:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-c", CHOOSES, *logfile], cwd=folder, stdout=subprocess.PIPE,
            stderr=err, text=True, check=True,
        )  # fmt: skip
    return done.stdout


def test_without_a_setting_the_file_is_next_to_the_workers_log(tmp_path: Path) -> None:
    folder = tmp_path / "of it"
    assert chosen(folder, "worker.log") == str(folder / "worker.engine.log")
    assert chosen(folder, "w") == str(folder / "w.engine.log")
    assert chosen(folder, "worker.log", str(tmp_path / "a.txt")) == str(tmp_path / "a.engine.txt")
    assert chosen(folder, None) == str(folder / "worker.engine.log")
    assert (folder / "worker.engine.log").exists()


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "worker.log")
    assert chosen(tmp_path, None, missing) == str(tmp_path / "worker.engine.log")
    (tmp_path / "worker.engine.log").unlink()
    (tmp_path / "worker.engine.log").mkdir()
    elsewhere = Path(chosen(tmp_path, None, missing))
    assert elsewhere.is_file() and elsewhere.name.endswith(".engine.log")
    elsewhere.unlink()


def test_the_setting_names_a_file_or_the_workers_own_log(tmp_path: Path) -> None:
    file = tmp_path / "vllm.log"
    assert choose(str(file), "json", None) == str(file)
    assert (choose("-", "text", "w.log"), choose(None, "json", "w.log")) == ("-", "-")
    for wrong in (str(tmp_path), str(tmp_path / "no" / "x"), str(file / "x")):
        with pytest.raises(SettingsError, match=r"WARMQ_ENGINE_LOG: .* cannot be written"):
            choose(wrong, "text", None)


def test_errors_name_the_file_if_there_is_one(tmp_path: Path) -> None:
    settings = load(VllmSettings, model="m", engine_log=str(tmp_path / "x"))
    assert settings.with_engine_log(None).see_engine_log == f"; vLLM's log is {tmp_path / 'x'}"
    assert load(VllmSettings, model="m", engine_log="-").see_engine_log == ""
    plain = load(WorkerSettings, engine="simulated")
    assert plain.with_engine_log("w.log") is plain and plain.see_engine_log == ""


def test_an_engine_process_writes_its_output_to_the_file(tmp_path: Path) -> None:
    file, code = tmp_path / "x.log", "from worker.engine.parent_death import end_engine_with_parent"
    code += f"; end_engine_with_parent({os.getpid()}); import os, sys; print('out')"
    code += "; sys.stderr.write('err\\n'); sys.stdout.flush(); os.write(2, b'native\\n')"
    shown = []
    for value in (str(file), "-", str(tmp_path / "no" / "x")):
        env = os.environ | {ENGINE_LOG: value}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=True
        )
        shown.append(done.stdout + done.stderr)
    assert shown == [b"", b"out\nerr\nnative\n", b"out\nerr\nnative\n"]
    assert file.read_text() == "err\nout\nnative\n" or file.read_text() == "out\nerr\nnative\n"


@pytest.fixture
def vllms_logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return vLLM's logger, as if this were one of its processes, without handlers."""
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    logger.setLevel(logging.INFO)
    return logger


def test_the_worker_logs_an_engine_processs_warnings_and_errors(
    vllms_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(processes.VARIABLE, "")
    monkeypatch.setattr(processes, "RELAY_S", 0.01)
    warnings = processes.Warnings(relay=True)
    processes.copy_warnings()
    vllms_logger.info("a step")
    vllms_logger.warning("careful\nin two lines")
    vllms_logger.error("the cause \udcff")

    def relayed() -> list[logging.LogRecord]:
        return [one for one in caplog.records if one.name == processes.log.name]

    eventually(lambda: len(relayed()) == 2, 20)
    first, second = relayed()
    assert (first.levelno, second.levelno) == (logging.WARNING, logging.ERROR)
    assert first.getMessage() == f"MainProcess[{os.getpid()}] careful\nin two lines"
    assert warnings.read() == f"MainProcess[{os.getpid()}] the cause ?"
    warnings.remove()


def test_a_line_that_a_full_disk_has_cut_hides_no_other(
    vllms_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(processes.VARIABLE, "")
    monkeypatch.setattr(processes, "RELAY_S", 3600)
    warnings = processes.Warnings(relay=True)
    processes.copy_warnings()
    with Path(os.environ[processes.VARIABLE]).open("ab") as file:
        file.write(b'[40,"half a li\n7\n')
    vllms_logger.error("the cause")
    assert warnings.read() == f"MainProcess[{os.getpid()}] the cause"
    warnings.remove()
    relayed = [one.getMessage() for one in caplog.records if one.name == processes.log.name]
    assert relayed == [f"MainProcess[{os.getpid()}] the cause"]


def test_a_warning_that_cannot_be_written_leaves_no_file_open(
    vllms_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(processes.VARIABLE, "/dev/full")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    processes.copy_warnings()
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        vllms_logger.warning("careful")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_the_workers_own_warnings_of_vllm_go_to_both_logs(
    vllms_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workers_log = io.StringIO()
    handler = logging.StreamHandler(workers_log)
    monkeypatch.setattr(logging.root, "handle", handler.handle)
    for variable in (ENGINE_LOG, "VLLM_LOGGING_STREAM"):
        monkeypatch.setenv(variable, "")  # both are as before at the test's end
        monkeypatch.delenv(variable)
    engine_log._file.cache_clear()
    engine_log.use(str(tmp_path / "x.log"))
    stream = engine_log.__getattr__("STREAM")
    vllms_logger.addHandler(logging.StreamHandler(stream))
    for _ in range(2):
        processes.quieten()
    vllms_logger.info("a step")
    vllms_logger.warning("careful")
    assert workers_log.getvalue() == "careful\n"
    assert (tmp_path / "x.log").read_text() == "a step\ncareful\n"
    stream.close()
    engine_log._file.cache_clear()

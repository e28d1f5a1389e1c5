"""Duplicate detection: exact on both sides of the memory bound."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

from contract.naming import request_id
from demo.stack import ROOT
from producer.input.seen import SeenIds


def test_each_id_is_new_once_in_memory_and_on_disk():
    ids = [request_id("b", str(i)) for i in range(3000)]
    with closing(SeenIds(in_memory=1000)) as seen:
        assert all(seen.add(i) for i in ids)
        assert not any(seen.add(i) for i in ids)
        assert seen.add(request_id("b", "another"))


def test_it_leaves_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    with closing(SeenIds(in_memory=0)) as seen:
        for i in range(60_000):  # more than the cache holds, so that a file is written
            seen.add(request_id("b", str(i)))
        assert list(tmp_path.iterdir()) == []


def test_a_full_temporary_folder_is_an_error_in_words(tmp_path):
    code = (
        "import resource; from contract.naming import request_id\n"
        "from producer.input.seen import SeenIds\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "seen = SeenIds(in_memory=0)\n"
        "try:\n"
        "    for n in range(500_000): seen.add(request_id('b', str(n)))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "seen.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT), "SQLITE_TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("WriteFailed cannot keep more custom_ids in a temporary file: ")
    assert "SQLITE_TMPDIR" in done.stdout

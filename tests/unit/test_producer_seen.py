"""Duplicate detection: exact on both sides of the memory bound."""

from __future__ import annotations

from contextlib import closing

from contract.keys import request_id
from producer.seen import SeenIds


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

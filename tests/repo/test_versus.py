"""The benchmark that compares two revisions: fair turns, honest ratios, nothing left behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from bench import versus


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    command = ["git", *who, *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def test_the_sides_take_turns_in_going_first() -> None:
    a, b = (versus.Side(name, Path(name)) for name in "ab")
    assert [side.name for pair in versus.turns((a, b), 3) for side in pair] == list("abbaab")


def test_the_ratio_is_of_runs_next_to_each_other() -> None:
    # The machine became slower after the first pair: no pair says that either side did.
    pairs = [({"per_s": 100.0}, {"per_s": 110.0}), ({"per_s": 50.0}, {"per_s": 45.0})]
    found = versus.summary(pairs)["per_s"]
    assert found["ratio"]["values"] == [1.1, 0.9]
    assert found["ratio"]["median"] == 1.0
    assert (found["rev"]["median"], found["tree"]["median"]) == (75.0, 77.5)


@pytest.mark.parametrize("fails", [False, True])
def test_the_other_revision_is_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a").write_text("old")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "--quiet", "-m", "old")
    (tmp_path / "a").write_text("new")
    monkeypatch.setattr(versus, "ROOT", tmp_path)
    try:
        with versus.checked_out("HEAD") as root:
            assert (root / "a").read_text() == "old"
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert not root.exists()
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1

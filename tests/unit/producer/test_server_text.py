"""The text of a server that workers share with people."""

from __future__ import annotations

from rich.console import Console

from contract.redis.announced_servers import SharedServer
from producer.cli.commands.top import _server_tables
from producer.queue_workers import server_text

SERVER = SharedServer(
    "host:8000", 12, 30, 24, 2, "nobody is slower", False, 30.1, 66.0, 8.0, 16.2, 1203
)


def test_the_text_has_our_part_the_reason_what_people_feel_and_the_tokens() -> None:
    text = server_text(SERVER)
    assert text.startswith("host:8000: 12 of 30 requests")
    for part in ("at most 24 (nobody is slower)", "first token 30.1 ms (target 66 ms)",
                 "between tokens 8 ms (target 16.2 ms)", "1,203 tokens"):  # fmt: skip
        assert part in text


def test_what_is_not_known_is_left_out() -> None:
    text = server_text(SERVER._replace(in_server=None, ttft_ms=None, itl_ms_target=None))
    assert text.startswith("host:8000: 12 requests")
    assert "first token" not in text
    assert "between tokens 8 ms," in text


def test_top_has_a_row_for_each_server_and_no_table_without_any() -> None:
    row = SERVER._asdict()
    worker = {"id": "w", "silent_s": 0.1, "shared": [row, row | {"server": "[b]:1", "why": "\x1b"}]}
    console = Console(width=160, record=True)
    for table in _server_tables([worker]):
        console.print(table)
    shown = console.export_text()
    assert "host:8000" in shown
    assert "30 / 66 ms" in shown
    assert "[b]:1" in shown
    assert "\x1b" not in shown
    assert list(_server_tables([{"id": "w", "silent_s": 0.1}])) == []

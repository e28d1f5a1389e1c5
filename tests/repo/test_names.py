"""Names that several files must agree on: keys, error codes, scripts."""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path

import pytest
from kit.campaigns import mutations
from kit.commands.error_codes import error_codes
from kit.protocol import script_keys

from contract import naming
from contract.errors import RequestFailed, RequestRejected
from contract.redis import keys
from contract.redis.scripts import PACKAGES, SHARED, source
from demo.stack import ROOT
from producer.cli import main

LUA = sorted(path for side in PACKAGES for path in (ROOT / side / "lua").glob("*.lua"))
PYTHON = sorted(path for side in ("contract", "worker", "producer", "gateway")
                for path in (ROOT / side).rglob("*.py"))  # fmt: skip


def test_a_worker_finds_its_scripts_where_no_other_package_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("gateway", "producer"):  # as in the worker's image
        monkeypatch.setitem(sys.modules, package, None)
    for path in (ROOT / "worker" / "lua").glob("*.lua"):
        assert source.__wrapped__(path.stem).endswith(path.read_text())
    with pytest.raises(LookupError):
        source.__wrapped__("push")


def test_no_two_scripts_have_one_name() -> None:
    names = [path.stem for path in LUA]
    assert len(names) > 40
    assert sorted(set(names)) == sorted(names)


def table() -> str:
    page = (ROOT / "docs/reference/redis-keys.md").read_text()
    return page.split("\n## ")[0]


def test_the_key_table_names_every_constant() -> None:
    texts = [v for name, v in vars(keys).items() if name.isupper() and isinstance(v, str)]
    named = [text for text in texts if text.startswith("warmq:")]
    assert named
    assert not [value for value in named if f"`{value}`" not in table()]
    assert f"`{keys.result_key('<id>')}`" in table()
    assert f"`{script_keys.worker_key('<worker>')}`" in table()
    for part in ("", "index", "finished", "failed", "kept:<request>"):
        assert f"`{keys.batch_key('<id>', part)}`" in table()
    assert f"`{script_keys.leased_key('<worker>/<seq>')}`" in table()
    assert f"`{keys.dead_key('<id>')}`" in table()


def test_the_key_table_names_every_key_of_the_scripts() -> None:
    text = "".join(path.read_text() for path in LUA)
    code = re.sub(r"--.*", "", text)
    used = set(re.findall(r"'(warmq:[a-z0-9_:-]+?):?'", code))
    assert {"warmq:leases:2", "warmq:dead", "warmq:worker:2", "warmq:batch"} <= used
    for name in used:
        assert f"`{name}" in table(), name


def test_every_script_tells_what_it_touches_and_returns() -> None:
    for path in LUA:
        if path.stem in SHARED:
            continue
        text = source(path.stem)
        assert text.startswith("-- Shared by every script")
        own = path.read_text()
        for word in ("-- ARGV:", "-- Touches:", "-- Returns:"):
            assert word in own, (path.name, word)
        touched = {name for name in re.findall(r"'(warmq:[a-z0-9_-]+)'", re.sub(r"--.*", "", own))}
        header = "".join(line for line in own.splitlines() if line.startswith("--"))
        for name in touched:
            assert name.removeprefix("warmq:") in header, (path.name, name)


def raised(path: Path) -> set[str]:
    """Return the codes that a file's rejections and failures name."""
    return set(re.findall(r"\bcode=\"([a-z_]+)\"", path.read_text()))


def test_the_documentation_lists_every_code_that_an_error_line_can_carry() -> None:
    # What answers over HTTP carry besides is in docs/reference/gateway.md.
    of_lines = [path for path in PYTHON if "gateway" not in path.parts]
    used = {RequestRejected.code, RequestFailed.code}.union(*map(raised, of_lines))
    scripts = "".join(path.read_text() for path in LUA)
    used |= set(re.findall(r"'(?:Request\w+)', '([a-z_]+)'", scripts))
    used |= set(re.findall(r"code, text = '([a-z_]+)'", scripts))
    assert {"poison", "invalid_json", "expired", "cancelled"} <= used
    assert used <= set(error_codes())


def test_the_gateways_page_lists_every_code_of_an_http_error() -> None:
    page = (ROOT / "docs/reference/gateway.md").read_text().partition("## Error codes")[2]
    used = set().union(*(raised(path) for path in PYTHON if "gateway" in path.parts))
    assert {"invalid_api_key", "queue_full", "too_many_bodies"} <= used
    assert {code for code in used if f"`{code}`" not in page} == set()


def test_the_page_lists_every_exit_status_of_the_producer() -> None:
    statuses = {
        value for name, value in vars(main).items() if name.isupper() and type(value) is int
    }
    assert len(statuses) >= 5
    page = (ROOT / "docs/reference/errors.md").read_text().partition("## Exit statuses")[2]
    found = re.findall(r"^\| producer \| ([\d, ]+) \|", page, re.MULTILINE)
    assert statuses | {0, 1} == {int(status) for row in found for status in row.split(",")}


def test_request_ids_are_uuid5_and_never_meet() -> None:
    namespace = uuid.uuid5(uuid.NAMESPACE_DNS, naming.TASK_NAME)
    assert naming.request_id("b1", "c1") == str(uuid.uuid5(namespace, "b1\0id\0c1"))
    assert naming.line_request_id("b1", 7) == str(uuid.uuid5(namespace, "b1\0line\x007"))
    assert naming.request_id("b1", "7") != naming.line_request_id("b1", 7)


def test_priorities_go_to_kombus_lists() -> None:
    from kombu.transport.redis import Channel

    assert Channel.priority_steps == list(naming.PRIORITY_STEPS)
    assert Channel.sep == naming.PRIORITY_SEPARATOR
    assert [naming.priority_list("q", p) for p in range(10)] == (
        ["q"] * 3 + ["q\x06\x163"] * 3 + ["q\x06\x166"] * 3 + ["q\x06\x169"]
    )


def test_every_name_that_a_script_uses_is_defined() -> None:
    # Redis raises an error for an unknown global variable only when the line runs.
    known = set(
        "ARGV KEYS and break cjson collectgarbage do else elseif end error false for function if "
        "in ipairs local math next nil not or pairs pcall redis repeat return select string table "
        "then tonumber tostring true type unpack until while".split()
    )
    for path in LUA:
        if path.stem in SHARED:
            continue
        code = re.sub(r"^\s*--.*", "", source(path.stem), flags=re.MULTILINE)
        code = re.sub(r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"", "''", code)
        code = re.sub(r"--.*", "", code)
        lists = [
            *re.findall(r"local ([\w, ]+)", code),
            *re.findall(r"function ?\w*\(([^)]*)\)", code),
            *re.findall(r"for ([\w, ]+?) (?:in|=)", code),
            *re.findall(r"function (\w+)", code),
            *re.findall(r"[{,]\s*(\w+) =", code),
        ]
        defined = {name.strip() for found in lists for name in found.split(",")}
        used = set(re.findall(r"(?<![.\w:])([A-Za-z_]\w*)\b", code))
        assert used - defined - known == set(), path.name


def test_every_mutation_finds_the_guard_that_it_removes() -> None:
    found = [value for value in vars(mutations).values() if isinstance(value, tuple)]
    assert len(found) > 5
    for name, guard, _ in found:
        (script,) = ROOT.glob(f"*/lua/{name}")
        assert script.read_text().count(guard) == 1, (name, guard)

"""Uploaded files: the short form, tables, and models that nobody serves are planned as they run."""

from __future__ import annotations

from pathlib import Path

import orjson
import pyarrow
import pyarrow.parquet
import pytest
from kit.gateways.browser import Watched, watched
from kit.gateways.live_stack import MODEL, Stack
from kit.gateways.page_stack import ended, lines
from playwright.sync_api import Browser

from contract.redis import keys
from contract.version import PROTOCOL


def upload(view: Watched, stack: Stack, file: Path) -> None:
    view.page.goto(f"{stack.gateway.url}/ui/submit")
    view.page.set_input_files("#file", file)
    view.page.get_by_role("button", name="Upload and plan").click()
    view.page.wait_for_url("**/ui/submit?file=file-*")


def requests(view: Watched) -> str:
    return view.page.locator(".stat", has_text="Requests").first.locator("dd").first.inner_text()


def started(view: Watched) -> str:
    """Start the batch; return its id."""
    view.page.get_by_role("button", name="Start").click()
    view.page.wait_for_url("**/ui/batches/batch_*")
    return view.page.url.rpartition("/")[2].partition("?")[0]


def answers(stack: Stack, batch_id: str) -> dict[str, str]:
    """Return the answers by custom_id."""
    found = ended(stack, batch_id)
    assert (found.status, found.request_counts.failed) == ("completed", 0)
    text = stack.client.files.content(found.output_file_id).read()
    rows = map(orjson.loads, text.splitlines())
    return {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
        for row in rows
    }


def test_lines_in_the_short_form_are_planned_shown_and_run(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "short.jsonl"
    ask = {"messages": [{"role": "user", "content": "Hello"}]}
    rows = [ask | {"custom_id": "a"}, ask, ask | {"custom_id": "c", "max_tokens": "x"}]
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    with watched(chrome) as view:
        upload(view, stack, file)
        assert requests(view) == "2"
        assert "line 3" in view.page.locator("main").inner_text()
        assert view.page.locator(".prompt h3").all_inner_texts() == ["a", "line-2"]
        assert view.axe() == []
        batch_id = started(view)
        found = ended(stack, batch_id)
        assert (found.request_counts.completed, found.request_counts.failed) == (2, 1)
        assert "short.jsonl" in view.page.locator("main").inner_text()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_is_mapped_previewed_and_run(
    chrome: Browser, stack: Stack, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / f"reviews.{kind}"
    if kind == "csv":
        file.write_text("key,text,label\n" + "".join(f"k{n},Text {n},x\n" for n in range(7)))
    else:
        table = {"key": [f"k{n}" for n in range(7)], "text": [f"Text {n}" for n in range(7)]}
        pyarrow.parquet.write_table(pyarrow.table(table), file)
    with watched(chrome) as view:
        upload(view, stack, file)
        assert view.page.get_by_role("button", name="Start").count() == 0
        view.page.select_option("#id", "key")
        view.page.fill("#user", "Sum: {text}")
        view.page.fill("#fields", "max_tokens=5")
        plan = view.page.locator("form[method=get] button")
        assert plan.inner_text() == "Plan"
        plan.click()
        view.page.wait_for_url("**user=Sum*")
        assert plan.inner_text() == "Plan again"
        assert requests(view) == "7"
        shown = view.page.locator(".prompt").all_inner_texts()
        assert len(shown) == 5
        assert "k0" in shown[0] and "Sum: Text 0" in shown[0]
        assert view.axe() == []
        found = answers(stack, started(view))
        assert found == {f"k{n}": Stack.text_of(f"Sum: Text {n}") for n in range(7)}
        view.page.reload()
        shown_page = view.page.locator("main").inner_text()
        assert f"reviews.{kind}" in shown_page and f"reviews.{kind}.jsonl" not in shown_page
        command = f"producer results {view.page.url.rpartition('/')[2].partition('?')[0]} -o "
        assert command in shown_page
        assert view.said == []


def test_a_model_that_nobody_serves_is_told_before_the_start(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    # With one model every name is that model: a second one is announced.
    other = {"state": "ready", "queue": "warmq.other", "model": "other", "protocol": PROTOCOL}
    now = b"%d" % stack.store.now_ms()
    stack.store._client.hset(keys.WORKERS, "w2", now + b"\0" + orjson.dumps(other))
    file = tmp_path / "other.jsonl"
    file.write_bytes(lines([""], model="gpt-4"))
    with watched(chrome) as view:
        upload(view, stack, file)
        told = view.page.locator("main").inner_text()
        assert "No worker serves gpt-4" in told
        assert f"served models: other, {MODEL}" in told
        view.page.select_option("#model", MODEL)
        view.page.get_by_role("button", name="Plan").click()
        view.page.wait_for_url(f"**model={MODEL}*")
        assert "No worker serves" not in view.page.locator("main").inner_text()
        assert set(answers(stack, started(view))) == {"request-0"}
    stack.store._client.hdel(keys.WORKERS, "w2")


def test_a_file_that_the_gateway_would_refuse_cannot_be_started(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    for name, content, told in (
        ("twice.jsonl", lines([""]) + b"\n" + lines([""]), "custom_id 'request-0' was used"),
        ("broken.jsonl", b'{"prompt": "x"}\nnot JSON\n', "line 2"),
    ):
        (tmp_path / name).write_bytes(content)
        with watched(chrome) as view:
            upload(view, stack, tmp_path / name)
            alert = view.page.get_by_role("alert").inner_text()
            assert told in alert, name
            assert view.page.get_by_role("button", name="Start").count() == 0


def test_repeated_ids_of_a_table_name_the_row(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    (tmp_path / "twice.csv").write_text("custom_id,prompt\nPhone,a\nPhone,b\n")
    with watched(chrome) as view:
        upload(view, stack, tmp_path / "twice.csv")
        alert = view.page.get_by_role("alert").inner_text()
        assert "row 2: custom_id 'Phone' was used before; make it unique" in alert


def test_a_bad_row_of_a_table_fails_alone(chrome: Browser, stack: Stack, tmp_path: Path) -> None:
    null, ragged = tmp_path / "null.parquet", tmp_path / "ragged.csv"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), null)
    ragged.write_text("n;text\n1;a\n2;b;c\n3;d\n")
    for file, told in ((null, "row 2, column text: is empty"), (ragged, "row 2: has 3 cells")):
        with watched(chrome) as view:
            upload(view, stack, file)
            view.page.fill("#user", "{text}")
            view.page.fill("#answers", "good, good")
            view.page.get_by_role("button", name="Plan").click()
            view.page.wait_for_url("**answers=good*")
            assert "given twice" in view.page.get_by_role("alert").inner_text()
            view.page.fill("#answers", "good, bad")
            view.page.get_by_role("button", name="Plan").click()
            view.page.wait_for_url("**bad*")
            shown = view.page.locator("main").inner_text()
            assert told in shown and "all other lines run" in shown, file
            invalid = view.page.locator(".stat", has_text="Invalid lines").locator("dd")
            assert (requests(view), invalid.first.inner_text()) == ("2", "1")
            assert view.axe() == []
            found = ended(stack, started(view))
            assert (found.request_counts.completed, found.request_counts.failed) == (2, 1)
            view.page.goto(f"{stack.gateway.url}/ui/batches/{found.id}/request?id=line-2")
            shown = view.page.locator("main").inner_text()
            assert told in shown and "Prompt" not in shown, "it has none"
            sent = stack.client.files.content(found.input_file_id).text.splitlines()
            body = orjson.loads(sent[0])["body"]
            assert body["structured_outputs"] == {"choice": ["good", "bad"]}
            failed = orjson.loads(stack.client.files.content(found.error_file_id).read())
            assert failed["custom_id"] == "line-2"
            error = failed["response"]["body"]["error"]
            assert error["message"].startswith(told), "as `producer submit` says it"
            assert view.said == []


@pytest.mark.timeout(180)
def test_a_table_that_unpacks_to_gigabytes_is_refused_and_costs_only_its_process(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "bomb.parquet"
    table = pyarrow.table({"prompt": ["x" * 2**29] * 2})
    pyarrow.parquet.write_table(table, file, compression="zstd", use_dictionary=False)
    with watched(chrome) as view:
        upload(view, stack, file)
        shown = view.page.locator("main").inner_text()
        # On a busy machine the seconds of the page end first.
        assert "cannot read bomb.parquet" in shown or "too much to plan" in shown
        assert view.page.locator(".stat").count() == 0
        assert stack.client.batches.list(limit=1)


def test_rows_spread_over_a_table_are_tried_before_the_whole_file(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "many.csv"
    file.write_text("prompt\n" + "".join(f"Say {n}\n" for n in range(1000)))
    with watched(chrome) as view:
        upload(view, stack, file)
        view.page.select_option("#model", MODEL)
        view.page.get_by_role("button", name="Plan").click()
        view.page.wait_for_url(f"**model={MODEL}*")
        last = view.page.locator(".prompt").last.inner_text().rpartition(" ")[2]
        assert int(last) > 500, "they are spread over the file"
        view.page.get_by_role("button", name="Try 20 rows").click()
        view.page.wait_for_url("**/ui/batches/batch_*")
        found = ended(stack, view.page.url.rpartition("/")[2].partition("?")[0])
        assert (found.status, found.request_counts.completed) == ("completed", 20)
        view.page.reload()
        table = view.page.locator("table.requests")
        assert table.locator("tbody tr").count() == 20
        asked = table.locator("td.words:nth-child(2)").all_inner_texts()
        assert len({int(text.removeprefix("Say ")) // 100 for text in asked}) == 10
        assert "Trial of many.csv" in view.page.locator("main").inner_text()
        view.page.get_by_role("link", name="Submit the whole file").click()
        view.page.wait_for_url("**/ui/submit?file=*")
        assert requests(view) == "1,000"
        assert view.page.locator("#model").input_value() == MODEL
        assert view.said == []

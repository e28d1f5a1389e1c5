"""The page over HTTP: who may see it, what its answers forbid a browser, which forms it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import orjson
import pytest
from kit.gateways.live_stack import Stack
from kit.gateways.page_stack import ended, lines, send

from contract.redis import keys
from demo.stack import eventually
from gateway.files.files import MARK
from gateway.redis.api_keys import ApiKeys

#: Every page, the ids standing for what is not there.
PAGES = ("/ui", "/ui/batches", "/ui/batches/x", "/ui/batches/x/request?id=y", "/ui/workers",
         "/ui/tenants", "/ui/dead", "/ui/submit", "/ui/submit?file=x", "/ui/live",
         "/ui/batches/x/download/answers")  # fmt: skip
WRITES = ("/ui/batches/x/cancel", "/ui/batches/x/retry", "/ui/dead", "/ui/submit/start",
          "/ui/submit", "/ui/logout")  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a gateway with keys, and a worker."""
    with Stack(tmp_path_factory.mktemp("page")) as found:
        ApiKeys.using(found.store).create("somebody")
        eventually(lambda: httpx.get(f"{found.url}/models").status_code == 401, 10)
        yield found


def csrf(text: str) -> str:
    """Return what the forms of a page send."""
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', text)
    assert found, text[:500]
    return found[1]


@contextmanager
def logged_in(stack: Stack, key: str) -> Iterator[httpx.Client]:
    """Yield a browser that has logged in."""
    with httpx.Client(base_url=stack.gateway.url) as client:
        page = client.get("/ui/login")
        data = {"key": key, "csrf": csrf(page.text), "next": "/ui/dead"}
        done = client.post("/ui/login", data=data)
        assert (done.status_code, done.headers["location"]) == (303, "/ui/dead")
        yield client


def key_of(stack: Stack, tenant: str, **limits: object) -> tuple[str, str]:
    """Return a new key, and its id."""
    secret, key = ApiKeys.using(stack.store).create(tenant, **limits)
    return secret, key.id


def test_without_a_login_every_page_leads_to_it_and_no_write_is_taken(stack: Stack) -> None:
    with httpx.Client(base_url=stack.gateway.url) as nobody:
        for path in PAGES:
            answer = nobody.get(path)
            if path == "/ui/live":
                assert answer.status_code == 401
                continue
            assert answer.status_code == 303, path
            assert answer.headers["location"].startswith("/ui/login?next=%2Fui"), path
        for path in WRITES:
            assert nobody.post(path, data={"csrf": "x"}).status_code == 401, path


@pytest.mark.parametrize("wanted", ["https://evil.example", "//evil.example", "/ui\\@evil", "/uix",
                                    "/ui/\r\nx: y", "javascript:alert(1)"])  # fmt: skip
def test_a_login_leads_to_no_place_outside_of_the_page(stack: Stack, wanted: str) -> None:
    secret, _ = key_of(stack, "somebody")
    with httpx.Client(base_url=stack.gateway.url) as client:
        token = csrf(client.get("/ui/login").text)
        data = {"key": secret, "csrf": token, "next": wanted}
        assert client.post("/ui/login", data=data).headers["location"] == "/ui"


def test_the_cookie_is_for_the_page_alone_and_no_script_reads_it(stack: Stack) -> None:
    secret, _ = key_of(stack, "somebody")
    with logged_in(stack, secret) as client:
        token = client.cookies["warmq_session"]
        page = client.get("/ui/login")
        data = {"key": secret, "csrf": csrf(page.text)}
        told = client.post("/ui/login", data=data).headers["set-cookie"]
        for part in ("HttpOnly", "SameSite=lax", "Path=/ui"):
            assert part in told
        secure = {"x-forwarded-proto": "https"}
        page = client.get("/ui/login")
        data = {"key": secret, "csrf": csrf(page.text)}
        told = client.post("/ui/login", data=data, headers=secure).headers["set-cookie"]
        assert "Secure" in told
        # Neither does the API take it, nor the page a key.
        cookie = {"cookie": f"warmq_session={token}"}
        assert httpx.get(f"{stack.url}/models", headers=cookie).status_code == 401
        bearer = {"authorization": f"Bearer {secret}"}
        assert httpx.get(f"{stack.gateway.url}/ui", headers=bearer).status_code == 303
        # What Redis has of it lets nobody in.
        kept = [*stack.store._client.scan_iter("warmq:gateway:session:*")]
        values = [stack.store._client.get(name) for name in kept]
        assert kept
        assert not any(token.encode() in text or secret.encode() in text for text in kept + values)


def test_every_answer_forbids_scripts_from_elsewhere_and_frames(stack: Stack) -> None:
    secret, _ = key_of(stack, "somebody")
    with logged_in(stack, secret) as client:
        for path in (*PAGES, "/ui/login"):
            if path == "/ui/live":
                continue
            answer = client.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", answer.text), path


@pytest.mark.parametrize("headers", [
    {"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"}, {"origin": "null"},
])  # fmt: skip
def test_a_form_of_another_site_is_not_taken_though_it_knew_the_token(
    stack: Stack, headers: dict[str, str]
) -> None:
    secret, _ = key_of(stack, "somebody")
    with logged_in(stack, secret) as client:
        token = csrf(client.get("/ui").text)
        for path in WRITES:
            if path == "/ui/submit":
                continue
            answer = client.post(path, data={"csrf": token}, headers=headers)
            assert answer.status_code == 403, path


def test_a_form_without_the_sessions_own_token_is_not_taken_and_keeps_no_file(
    stack: Stack,
) -> None:
    mine, _ = key_of(stack, "files")
    other, _ = key_of(stack, "files")
    with logged_in(stack, mine) as client, logged_in(stack, other) as another:
        foreign = csrf(another.get("/ui").text)
        for sent in ("", "x", "é", foreign):
            for path in WRITES:
                if path == "/ui/submit":
                    continue
                assert client.post(path, data={"csrf": sent}).status_code == 403, path
            answer = client.post("/ui/submit", data={"csrf": sent}, files={"file": ("a", b"{}")})
            assert answer.status_code == 403
        api = openai.OpenAI(base_url=stack.url, api_key=mine)
        assert api.files.list().data == []
        api.close()
        files = Path(stack.folder / "files")
        contents = [path.name for path in files.rglob("*") if path.is_file()]
        assert [name for name in contents if not name.startswith(MARK)] == []


def test_a_revoked_key_ends_its_sessions_and_their_streams_within_seconds(stack: Stack) -> None:
    secret, key_id = key_of(stack, "somebody")
    with logged_in(stack, secret) as client:
        with client.stream("GET", "/ui/live", timeout=30) as stream:
            text = stream.iter_lines()
            assert next(text) == "retry: 2000"
            ApiKeys.using(stack.store).revoke(key_id)
            assert any(line == "event: out" for line in text)
        eventually(lambda: client.get("/ui").status_code == 303, 10, "the session has ended")


def test_a_session_that_logged_out_is_no_session_any_more(stack: Stack) -> None:
    secret, _ = key_of(stack, "somebody")
    with logged_in(stack, secret) as client:
        cookie = client.cookies["warmq_session"]
        client.post("/ui/logout", data={"csrf": csrf(client.get("/ui").text)})
        kept = {"cookie": f"warmq_session={cookie}"}
        assert httpx.get(f"{stack.gateway.url}/ui", headers=kept).status_code == 303


def test_a_tenant_sees_and_changes_nothing_of_others_and_an_operator_all_load(
    stack: Stack,
) -> None:
    theirs, _ = key_of(stack, "theirs")
    mine, _ = key_of(stack, "mine")
    operators, _ = key_of(stack, "ops", operator=True)
    api = openai.OpenAI(base_url=stack.url, api_key=theirs)
    batch_id = send(stack, lines(["", "simulate:fail"]), "secret-name.jsonl", api)
    batch = ended(stack, batch_id, api)
    stack.store._client.hset(keys.TENANTS, "theirs", b"2\0")
    worker = {"why": "secret reason", "queue": "warmq", "state": "degraded", "slots": 1}
    client = stack.store._client
    now = stack.store.now_ms()
    client.hset(keys.WORKERS, "broken", b"%d\0" % now + orjson.dumps(worker))
    letter = b"\0".join([b"%d" % now, b"1", b"warmq", b"", b"", b"", b"null", b"secret letter"])
    client.hset(keys.DEAD, "7", letter)
    client.lpush(keys.dead_key("7"), b"x")
    with logged_in(stack, mine) as browser, logged_in(stack, operators) as operator:
        for path in (f"/ui/batches/{batch_id}", f"/ui/batches/{batch_id}/request?id=request-0",
                     f"/ui/batches/{batch_id}/download/answers",
                     f"/ui/submit?file={batch.input_file_id}"):  # fmt: skip
            assert browser.get(path).status_code == 404, path
            assert "secret-name" not in browser.get(path).text
        told = csrf(browser.get("/ui").text)
        for path in ("cancel", "retry"):
            answer = browser.post(f"/ui/batches/{batch_id}/{path}", data={"csrf": told})
            assert answer.status_code == 404
        data = {"csrf": told, "file": batch.input_file_id, "endpoint": "/v1/chat/completions"}
        assert browser.post("/ui/submit/start", data=data).status_code == 404
        for path in ("/ui", "/ui/batches", "/ui/submit", "/ui/dead", "/ui/workers", "/ui/tenants"):
            text = browser.get(path).text
            assert "theirs" not in text, path
            assert "secret" not in text, path
        data = {"csrf": told, "id": "7", "do": "delete"}
        assert browser.post("/ui/dead", data=data).headers["location"] == "/ui/dead?notice=none"
        assert client.hexists(keys.DEAD, "7")
        assert "theirs" in operator.get("/ui/tenants").text
        one = operator.get("/ui/tenants?tenant=theirs").text
        assert '<th scope="row">theirs' in one
        assert '<th scope="row">mine' not in one
        assert "theirs" not in browser.get("/ui/tenants?tenant=other").text
        assert "secret reason" in operator.get("/ui/workers").text
        assert "secret letter" in operator.get("/ui/dead").text
        assert operator.get(f"/ui/batches/{batch_id}").status_code == 404
        with browser.stream("GET", f"/ui/live?batches={batch_id}", timeout=30) as stream:
            found = []
            for line in stream.iter_lines():
                found.append(line)
                if sum(one == "event: fleet" for one in found) >= 1 and len(found) > 3:
                    break
            assert not any(batch_id in line for line in found)
    client.hdel(keys.WORKERS, "broken")
    client.delete(keys.DEAD, keys.dead_key("7"))
    api.close()


def test_assets_are_kept_for_ever_under_their_own_address_and_weigh_little(stack: Stack) -> None:
    page = httpx.get(f"{stack.gateway.url}/ui/login").text
    addresses = set(re.findall(r'(?:src|href)="(/ui/assets/[^"]+)"', page))
    assert len(addresses) >= 3
    total = 0
    for address in addresses:
        answer = httpx.get(stack.gateway.url + address)
        assert "immutable" in answer.headers["cache-control"]
        total += len(answer.content)
        stale = urlsplit(address).path.replace(address.split("/")[3], "0" * 12)
        old = httpx.get(stack.gateway.url + stale)
        assert (old.status_code, old.headers["cache-control"]) == (200, "no-cache")
    assert total < 60_000
    for wrong in ("x", "..%2f..%2fapp.py", "page.css%00"):
        assert httpx.get(f"{stack.gateway.url}/ui/assets/1/{wrong}").status_code == 404


def test_pages_of_no_number_and_no_name_are_answers_to_the_client(stack: Stack) -> None:
    secret, _ = key_of(stack, "somebody")
    with logged_in(stack, secret) as client:
        for path in ("/ui/workers?page=x", "/ui/workers?page=-1", "/ui/workers?page=99999",
                     "/ui?lang=xx&theme=%00", "/ui/batches?after=x", "/ui/submit?file=%ff",
                     "/ui/batches/%20", "/ui/batches/x/download/y"):  # fmt: skip
            assert client.get(path).status_code < 500, path

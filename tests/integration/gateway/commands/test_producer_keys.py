"""`producer keys`: what it prints, and that a key is shown once."""

from __future__ import annotations

import pytest
import redis
from kit.commands.support import as_json, run_producer

from contract.redis.batches import BatchStore
from gateway.redis.api_keys import ApiKeys, digest_of


def test_create_prints_the_key_alone_and_no_other_command_prints_it(
    redis_url: str, redis_client: redis.Redis
) -> None:
    done = run_producer(
        "keys", "create", "--tenant", "research", "--name", "ci", redis_url=redis_url
    )
    assert done.returncode == 0
    (secret,) = done.stdout.splitlines()
    assert secret.startswith("sk-")
    assert secret not in done.stderr
    shown = run_producer("keys", "list", redis_url=redis_url).stdout
    assert secret not in shown
    assert f"...{secret[-4:]}" in shown
    assert "research" in shown
    as_list = run_producer("keys", "list", "--json", redis_url=redis_url).stdout
    assert secret not in as_list
    assert not any(secret.encode() in redis_client.dump(key) for key in redis_client.scan_iter())


def test_limits_are_kept(redis_url: str, store: BatchStore) -> None:
    words = (
        "--requests-per-minute 60 --tokens-per-minute 90000 --enqueued-tokens 2000000 "
        "--file-bytes 1073741824 --models a,org/b,a --highest-priority 3"
    ).split()
    made = as_json(run_producer("keys", "create", "--tenant", "t", *words, "--json",
                                redis_url=redis_url))  # fmt: skip
    (key,) = ApiKeys.using(store).all()
    assert digest_of(made["key"])
    assert made["id"] == key.id
    assert (key.tenant, key.requests_per_minute, key.tokens_per_minute) == ("t", 60, 90_000)
    assert (key.enqueued_tokens, key.file_bytes) == (2_000_000, 2**30)
    assert (key.models, key.highest_priority) == (("a", "org/b"), 3)
    shown = run_producer("keys", "list", redis_url=redis_url).stdout
    for text in ("requests/min 60", "models a org/b", "priority from 3"):
        assert text in shown


def test_revoke_says_when_and_twice_the_same(redis_url: str, store: BatchStore) -> None:
    _, key = ApiKeys.using(store).create("t")
    words = ("keys", "revoke", key.id, "--json")
    first = as_json(run_producer(*words, redis_url=redis_url))
    assert first["revoked_at"]
    assert as_json(run_producer(*words, redis_url=redis_url)) == first
    assert "revoked" in run_producer("keys", "list", redis_url=redis_url).stdout
    (listed,) = as_json(run_producer("keys", "list", "--json", redis_url=redis_url))
    assert listed == first


@pytest.mark.parametrize(("words", "told"), [
    (("revoke", "key_none"), "there is no key 'key_none'; see `producer keys list`"),
    (("create", "--tenant", "a b"), "tenant 'a b'"),
    (("create", "--models", "a,,b"), "names of models"),
    (("create", "--name", "a\nb"), "printable"),
    (("create", "--requests-per-minute", "0"), "1<=x<="),
    (("create", "--highest-priority", "10"), "0<=x<=9"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_words(
    redis_url: str, words: tuple[str, ...], told: str
) -> None:
    done = run_producer("keys", *words, redis_url=redis_url)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""


def test_without_keys_the_list_is_empty(redis_url: str) -> None:
    assert as_json(run_producer("keys", "list", "--json", redis_url=redis_url)) == []


def test_the_first_key_says_that_page_and_api_ask_for_a_key_from_now_on(redis_url: str) -> None:
    said = [run_producer("keys", "create", redis_url=redis_url).stderr for _ in range(2)]
    assert ["the page and the API" in text for text in said] == [True, False]

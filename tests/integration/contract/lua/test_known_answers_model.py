"""Random histories of submits with --reuse: a model knows which answers are known, and each text.

The model has for each tenant, model and question the request whose result was noted last, and
whether that result still exists. A reused answer must be exactly what the model expects, and a
question must be computed if and only if its last result is gone, failed or was cut.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.commands.known import (
    announce,
    answer_all,
    ask,
    lines_of,
    questions,
    reusing,
    says,
    text_of,
)
from kit.commands.submitting import submit
from kit.commands.support import queued, state

from contract.naming import request_id
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.known import KnownAnswers
from contract.results import outcome_of, read_meta

TENANTS, MODELS = ("default", "other"), ("m1", "m2")
TEXTS = [f"question {n}" for n in range(12)]
#: What a step does, more often what leads to reuse.
STEPS = ("submit",) * 6 + ("delete", "evict", "forget", "swap", "recreate", "cancel", "retry")
Question = tuple[str, str, str]


@dataclass
class History:
    """One history in an empty Redis, and what the model knows of it."""

    store: BatchStore
    client: redis.Redis
    folder: Path
    random: random.Random
    model: str = "m1"
    #: The request with the answer that was noted last.
    noted: dict[Question, str] = field(default_factory=dict)
    #: Requests with results that may be reused, with their batches and questions.
    alive: dict[str, tuple[str, Question]] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)
    number: int = 0
    #: Numbers of submits, and of those in which an answer was reused.
    submits: int = 0
    reusing: int = 0

    def step(self, what: str) -> None:
        """Do one step."""
        getattr(self, what)()

    def submit(self, batch_id: str = "") -> None:
        """Submit some questions, compare what waits and what is cached, and answer the rest."""
        if not batch_id:
            self.number += 1
            batch_id = f"b{self.number}"
        tenant = self.random.choice(TENANTS)
        texts = self.random.sample(TEXTS, self.random.randint(1, len(TEXTS)))
        ask(self.store, self.folder / "in", batch_id, texts, tenant=tenant)
        self.batches[batch_id] = tenant
        known = {}
        for n, text in enumerate(texts):
            question = (tenant, self.model, text)
            _, answered = self.alive.get(self.noted.get(question, ""), ("", None))
            if answered == question:
                known[text] = request_id(batch_id, f"r{n}")
        waiting = [each["headers"]["warmq"]["custom_id"] for each in queued(self.store)]
        assert waiting == [f"r{n}" for n, text in enumerate(texts) if text not in known]
        assert state(self.store, batch_id).number("cached") == len(known)
        for text, rid in known.items():
            self._note(batch_id, (tenant, self.model, text), rid)
        self._answer(batch_id, tenant, texts)
        self._check(batch_id, texts, set(known))
        self.submits += 1
        self.reusing += bool(known)

    def _note(self, batch_id: str, question: Question, rid: str) -> None:
        self.noted[question] = rid
        self.alive[rid] = (batch_id, question)

    def _answer(self, batch_id: str, tenant: str, texts: list[str]) -> None:
        fates = {text: self.random.choice(("", "", "", "cut", "fail")) for text in texts}
        computed = answer_all(self.store, self.model, tenant=tenant, fate=fates.__getitem__)
        for n, text in enumerate(texts):
            if text in computed and not fates[text]:
                rid = request_id(batch_id, f"r{n}")
                self._note(batch_id, (tenant, self.model, text), rid)

    def _check(self, batch_id: str, texts: list[str], known: set[str]) -> None:
        batch = state(self.store, batch_id)
        assert batch.finished and batch.terminal == batch.number("total") == len(texts)
        for line, text in zip(lines_of(self.store, batch_id), texts, strict=True):
            if line["response"] is None:
                assert text not in known
                continue
            assert text_of(line) == says(text, self.model)
            assert line["warmq"].get("reused", False) == (text in known)

    def _any_batch(self) -> str:
        return self.random.choice(sorted(self.batches)) if self.batches else ""

    def _gone(self, batch_id: str) -> None:
        self.alive = {rid: one for rid, one in self.alive.items() if one[0] != batch_id}

    def delete(self) -> None:
        """Delete a batch."""
        if batch_id := self._any_batch():
            self.store.delete(batch_id, force=True)
            del self.batches[batch_id]
            self._gone(batch_id)

    def recreate(self) -> None:
        """Delete a batch, and make it again with other lines, which get the same request ids."""
        if batch_id := self._any_batch():
            self.store.delete(batch_id, force=True)
            self._gone(batch_id)
            self.submit(batch_id)

    def evict(self) -> None:
        """Lose some results, as a Redis that evicts keys does."""
        for rid in self.random.sample(sorted(self.alive), min(3, len(self.alive))):
            self.client.delete(keys.result_key(rid))
            del self.alive[rid]

    def forget(self) -> None:
        """Forget a tenant's answers."""
        tenant = self.random.choice(TENANTS)
        KnownAnswers.using(self.store).forget(tenant)
        self.noted = {key: rid for key, rid in self.noted.items() if key[0] != tenant}

    def swap(self) -> None:
        """Let the queue's worker serve another model."""
        self.model = self.random.choice(MODELS)
        announce(self.client, self.model)

    def cancel(self) -> None:
        """Cancel a batch of which nothing was computed."""
        self.number += 1
        batch_id = f"b{self.number}"
        path = questions(self.folder / "in", [f"never {n}" for n in range(3)])
        submit(self.store, path, reusing(batch_id))
        self.store.cancel(state(self.store, batch_id))
        answer_all(self.store, self.model)
        assert state(self.store, batch_id).number("cancelled") == 3

    def retry(self) -> None:
        """Run failed requests again; their answers are then known."""
        batch_id = self._any_batch()
        if not batch_id:
            return
        batch = state(self.store, batch_id)
        failed = [
            (rid, entry)
            for chunk in self.store.index(batch_id)
            for rid, entry in zip(chunk.request_ids(batch_id), chunk.entries, strict=True)
            if (raw := self.store.results([rid])[0]) and outcome_of(read_meta(raw)) == "failed"
        ]
        texts = self._texts_of(batch_id)
        self.store.retry(batch, ["failed"])
        answer_all(self.store, self.model, tenant=self.batches[batch_id])
        for rid, entry in failed:
            self._note(batch_id, (self.batches[batch_id], self.model, texts[entry[1]]), rid)

    def _texts_of(self, batch_id: str) -> dict[str, str]:
        """Return the questions of a batch's messages that RETRY may queue, by custom_id."""
        found = {}
        for key in self.client.scan_iter(f"{keys.batch_key(batch_id)}:kept:*"):
            for raw in self.client.lrange(key, 0, -1):
                text = next(text for text in sorted(TEXTS, reverse=True) if text in raw.decode())
                custom_id = raw.decode().split('"custom_id":"')[1].split('"')[0]
                found[custom_id] = text
        return found


def lived(
    store: BatchStore, client: redis.Redis, folder: Path, steps: list[str], seed: int
) -> History:
    """Return a history of these steps in an empty Redis."""
    client.flushall()
    history = History(store, client, folder, random.Random(seed))
    for what in steps:
        announce(client, history.model)
        history.step(what)
    return history


@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.lists(st.sampled_from(STEPS), min_size=10, max_size=30), st.integers(0, 2**32))
def test_reused_answers_are_right_and_the_rest_is_computed(
    redis_client: redis.Redis, store: BatchStore, tmp_path: Path, steps: list[str], seed: int
) -> None:
    lived(store, redis_client, tmp_path, steps, seed)


def test_most_submits_of_such_histories_reuse_answers(
    redis_client: redis.Redis, store: BatchStore, tmp_path: Path
) -> None:
    submits = reusing = 0
    for seed in range(5):
        steps = random.Random(seed).choices(STEPS, k=30)
        history = lived(store, redis_client, tmp_path, steps, seed)
        submits, reusing = submits + history.submits, reusing + history.reusing
    assert reusing > submits / 2, (reusing, submits)

"""A listener of texts: what it asks of Redis and when, however little it hears."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from contract import naming, streaming
from contract.errors import StoreForbidden, StoreUnreachable
from contract.streaming import LISTEN_S, Listener, Piece, Transcript, encode_pieces


class Redis:
    """A Redis, its connections and its clock: what a test says is published is heard at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.refuses: Exception | None = None
        #: When which requests were announced.
        self.announced: list[tuple[float, list[str]]] = []
        self.open: list[Connection] = []
        self.pings = 0

    def pubsub(self) -> Connection:
        connection = Connection(self)
        self.open.append(connection)
        return connection

    def publish(self, channel: str, data: bytes) -> None:
        assert channel == naming.LISTEN_CHANNEL
        self.announced.append((self.now, orjson.loads(data)["ids"]))

    def tells(self, *pieces: Piece) -> None:
        """Publish some pieces."""
        self.says("text", encode_pieces(pieces))

    def says(self, channel: str, data: bytes) -> None:
        """Publish anything."""
        heard = {"type": "message", "channel": channel.encode(), "data": data}
        for connection in self.open:
            if not connection.half_open:
                connection.heard.append(heard)

    def after(self, seconds: float, listener: Listener) -> list[Piece]:
        """Let time pass; return what the listener reads then."""
        self.now += seconds
        return listener.read(0)


class Connection:
    """One subscription."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.heard: list[dict[str, Any]] = []
        self.subscribed = self.half_open = False

    def subscribe(self, *channels: str) -> None:
        self.heard += [{"type": "subscribe", "channel": name.encode()} for name in channels]
        self.subscribed = True

    def get_message(self, timeout: float = 0.0) -> dict[str, Any] | None:
        if self.redis.refuses is not None:
            raise self.redis.refuses
        return self.heard.pop(0) if self.heard and self.subscribed else None

    def ping(self) -> None:
        self.redis.pings += 1
        if not self.half_open:
            self.heard.append({"type": "pong", "channel": None, "data": b""})

    def close(self) -> None:
        self.redis.open.remove(self)


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> Redis:
    """Return a Redis whose clock is the listener's."""
    made = Redis()
    monkeypatch.setattr(streaming, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.mark.parametrize("error", [StoreForbidden("NOPERM"), StoreUnreachable("gone")])
def test_a_listener_that_was_refused_at_first_hears_later(redis: Redis, error: Exception) -> None:
    listener = Listener(redis, ["a"])
    redis.refuses = error
    for _ in range(2):
        with pytest.raises(type(error)):
            listener.read(0)
        assert redis.open == []
    redis.refuses = None
    listener.read(0)
    redis.tells(Piece("a", 1, 0, 0, "Once"))
    assert redis.after(0.1, listener) == [Piece("a", 1, 0, 0, "Once")]


def test_a_subscription_that_nobody_confirms_is_none(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(redis, ["a"])
    monkeypatch.setattr(Connection, "get_message", lambda *_, **__: None)
    with pytest.raises(StoreUnreachable):
        listener.read(0)
    assert redis.open == []
    assert redis.announced == []


def test_a_subscription_that_is_lost_is_made_anew_and_the_texts_are_asked_for(
    redis: Redis,
) -> None:
    listener = Listener(redis, ["a"])
    listener.read(0)
    redis.refuses = StoreUnreachable("gone")
    with pytest.raises(StoreUnreachable):
        redis.after(0.1, listener)
    assert redis.open == []
    redis.refuses = None
    redis.after(0.1, listener)
    redis.tells(Piece("a", 1, 0, 0, "Once"))
    assert redis.after(0.1, listener) == [Piece("a", 1, 0, 0, "Once")]
    assert len(redis.announced) == 2


def test_a_missing_piece_is_asked_for_while_text_keeps_coming(redis: Redis) -> None:
    listener = Listener(redis, ["a"])
    listener.read(0)
    redis.tells(Piece("a", 1, 0, 0, "Once"))
    redis.after(2, listener)
    redis.tells(Piece("a", 1, 0, 5, "upon"))
    redis.tells(Piece("a", 1, 0, 9, " a"))
    redis.after(0.1, listener)
    began = redis.now
    for n in range(50):
        redis.tells(Piece("a", 1, 0, 11 + n, "."))
        redis.after(0.1, listener)
    times = [at - began for at, _ in redis.announced[1:]]
    assert times[0] == pytest.approx(0.1)
    assert 3 <= len(times) <= 6  # once a second, however much comes
    redis.tells(Piece("a", 1, 0, 0, "Once upon a" + 50 * "."))
    redis.after(0.1, listener)
    asked = len(redis.announced)
    redis.after(2, listener)
    assert len(redis.announced) == asked


def test_who_hears_of_one_request_announces_itself_for_the_others(redis: Redis) -> None:
    listener = Listener(redis, ["a", "b"])
    listener.read(0)
    for n in range(int(3 * LISTEN_S)):
        redis.tells(Piece("a", 1, 0, n, "."))
        redis.after(1, listener)
    assert redis.announced[0] == (1000.0, ["a", "b"])
    times = [at for at, ids in redis.announced if "b" in ids]
    assert max(b - a for a, b in pairwise(times)) < LISTEN_S
    assert redis.now - times[-1] < LISTEN_S
    assert {one for _, ids in redis.announced[1:] for one in ids} == {"b"}


def test_a_subscription_that_is_dead_without_a_sign_is_made_anew(redis: Redis) -> None:
    listener = Listener(redis, ["a"])
    listener.read(0)
    (dead,) = redis.open
    dead.half_open = True
    for _ in range(12):
        redis.after(1, listener)
    assert redis.open != [dead]
    asked = len(redis.announced)
    redis.tells(Piece("a", 1, 0, 0, "Once"))
    assert redis.after(0.1, listener) == [Piece("a", 1, 0, 0, "Once")]
    assert redis.announced[asked - 1][0] > 1010.0


@pytest.mark.parametrize("every_s", [0.3, 1.0, 60.0])
def test_a_subscription_that_answers_is_kept_however_seldom_it_is_read(
    redis: Redis, every_s: float
) -> None:
    listener = Listener(redis, ["a"])
    listener.read(0)
    opened = list(redis.open)
    for _ in range(200):
        redis.after(every_s, listener)
    assert redis.open == opened
    assert 0 < redis.pings <= 200 * every_s / (LISTEN_S / 3)


def taken(transcript: Transcript, *pieces: tuple[int, int, str]) -> list[tuple[int, int, str]]:
    """Take in pieces of one attempt, (choice, at, text); return what of them is new."""
    found = [transcript.add(Piece("a", 1, *piece)) for piece in pieces]
    return [(piece.choice, piece.at, piece.text) for piece in found if piece is not None]


@pytest.mark.parametrize("first", ["Once", "Once upon", "Once upon a time"])
def test_a_choice_that_is_written_anew_takes_no_other_with_it(first: str) -> None:
    """A server that runs a request again, and only the second choice has another text."""
    transcript = Transcript()
    taken(transcript, (0, 0, "Once upon"), (1, 0, "Twice"), (2, 0, "Thrice"))
    new = taken(transcript, (0, 0, first), (1, 0, "Never"), (2, 0, "Thrice"))
    assert new[-1] == (1, 0, "Never")
    longest = max("Once upon", first, key=len)
    assert transcript.texts == {0: longest, 1: "Never", 2: "Thrice"}
    assert transcript.restarts == 2
    assert taken(transcript, (0, len(longest), "!")) == [(0, len(longest), "!")]
    assert transcript.gaps == set()


def test_a_text_that_leaves_the_former_one_later_is_not_mixed_with_it() -> None:
    """One that a user runs again has the same attempt, and may begin with the same words."""
    transcript = Transcript()
    taken(transcript, (0, 0, "Once upon"), (1, 0, "Twice"))
    transcript.ended = "failed"
    assert taken(transcript, (0, 0, "On"), (0, 2, "ly"), (0, 4, " a test")) == [
        (0, 0, "Only"), (0, 4, " a test")
    ]  # fmt: skip
    assert transcript.texts == {0: "Only a test", 1: "Twice"}
    assert (transcript.restarts, transcript.ended) == (2, "")

"""`producer watch`."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing

import click

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.index import leader_of
from contract.redis.batches import BatchStore
from contract.results import outcome_of, read_meta
from contract.streaming import Piece, Transcript, texts_of
from producer.batch_watch import BatchWatch
from producer.cli import options, progress, show
from producer.cli.context import WATCH_AGAIN, Context, Exit, hint, pass_context
from producer.cli.progress import tell
from producer.queue_workers import QueueWorkers

Entry = dict[str, str]

#: How long to wait for text before looking whether there is a result.
LOOK_S = 1.0
#: How often to say what the workers do while no text comes, in seconds.
TELL_S = 30.0


@click.command("watch")
@options.batch_id
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="With --stream: this request.")
@click.option("--stream", is_flag=True, help="Print the request's text while it is written.")
@options.as_json
@pass_context
def command(
    context: Context, *, batch_id: str, custom_id: str | None, stream: bool, as_json: bool
) -> Exit:
    """Follow a batch to its end: done and failed, rate, tokens/s, time left.

    With --request and --stream: print the text of one request as the model writes
    it, of its first choice; with --json every piece of all choices, an entry each.
    """
    if stream != (custom_id is not None):
        raise click.UsageError("--stream and --request go together: a text is one request's")
    store, batch = context.store, context.batch(batch_id)
    if custom_id is not None:
        outcome = listen(store, batch, custom_id, show.put_json if as_json else None)
        return Exit.ALL_WELL if outcome == "completed" else Exit.SOME_FAILED
    with hint(WATCH_AGAIN.format(batch_id)):
        batch = progress.watch(store, batch)
    if as_json:
        show.put_json(show.batch_json(batch))
    return show.ended(batch)


def listen(
    store: BatchStore, batch: Batch, custom_id: str, show: Callable[[Entry], None] | None = None
) -> str:
    """Print the text of one request until it has its result; return its outcome.

    With `show`, nothing is printed, and it gets what is heard of all choices: when the text begins,
    each piece, and the end.

    Raises:
        BatchConflict: if there is no such request, or its result is gone.
        BatchChanged: if the batch is deleted or submitted anew meanwhile.
    """
    found, own_id = store.find(batch, custom_id)
    request_id = leader_of(found) or own_id
    same = BatchWatch(store, batch, "a request of it was watched", may_reopen=True)
    workers = QueueWorkers(store, batch.fields.get("queue", ""))
    text = _Shown() if show is None else _Entries(show)
    tell_at = 0.0
    with closing(store.listener(request_id)) as listener:
        transcript = listener.transcripts[request_id]
        while (raw := store.results([request_id])[0]) is None:
            pieces = listener.read(LOOK_S)
            for piece in pieces:
                text.add(piece)
            if not pieces:
                _still_there(store, same, request_id)
            now = time.monotonic()
            if not pieces and now >= tell_at:
                tell(f"{custom_id} waits; {workers.text()}")
            if pieces or now >= tell_at:
                tell_at = now + TELL_S
    meta = read_meta(raw)
    outcome = outcome_of(meta)
    text.end(transcript, outcome, texts_of(meta.get("result")) if outcome == "completed" else {})
    return outcome


def _still_there(store: BatchStore, same: BatchWatch, request_id: str) -> None:
    """Raise where no result will come any more."""
    batch = same.state()
    if not batch.finished or store.results([request_id]) != [None]:
        return
    if same.state().number("retried") == batch.number("retried"):  # else it is there anew
        raise BatchConflict(f"batch {batch.id} has ended, and this result is gone: it expired")


class _Shown:
    """Prints the text of the first choice."""

    def __init__(self) -> None:
        self._written = ""

    def add(self, piece: Piece) -> None:
        if piece.choice:
            return
        if self._written and not piece.at:
            _write("\n")
            tell(f"attempt {piece.attempt}: the text begins anew")
            self._written = ""
        self._written += piece.text
        _write(piece.text)

    def end(self, transcript: Transcript, outcome: str, texts: Mapping[int, str]) -> None:
        had, text = self._written, texts.get(0, "")
        if text.startswith(had):
            _write(text[len(had) :] + "\n")
        else:
            _write("\n")
            tell("the result's text is another than what was written meanwhile:")
            _write(text + "\n")


class _Entries:
    """Shows the text of all choices as entries; the result's rest, and the end, come last."""

    def __init__(self, show: Callable[[Entry], None]) -> None:
        self._show = show
        self._attempt = 0
        #: What the entries since the last `begin` say, by choice.
        self._said: dict[int, str] = {}

    def add(self, piece: Piece) -> None:
        if piece.attempt != self._attempt:
            self._begin(piece.attempt)
        elif piece.choice in self._said and not piece.at:  # the other choices stay as they are
            said = self._said
            self._begin(piece.attempt)
            for choice, text in said.items():
                if choice != piece.choice:
                    self._say(piece._replace(choice=choice, text=text))
        self._say(piece)

    def _begin(self, attempt: int) -> None:
        self._attempt, self._said = attempt, {}
        self._show({"event": "begin", "attempt": str(attempt)})

    def _say(self, piece: Piece) -> None:
        self._said[piece.choice] = self._said.get(piece.choice, "") + piece.text
        self._show({
            "event": "text", "attempt": str(piece.attempt), "choice": str(piece.choice),
            "at": str(piece.at), "text": piece.text,
        })  # fmt: skip

    def end(self, transcript: Transcript, outcome: str, texts: Mapping[int, str]) -> None:
        had, attempt = dict(transcript.texts), max(1, transcript.attempt)
        whole = bool(texts) and all(texts.get(n, "").startswith(t) for n, t in had.items())
        for choice, text in texts.items() if whole else ():
            at = len(had.get(choice, ""))
            if piece := transcript.add(Piece("", attempt, choice, at, text[at:])):
                self.add(piece)
        self._show({"event": "end", "attempt": str(attempt), "outcome": outcome,
                    "whole": str(int(whole))})  # fmt: skip


def _write(text: str) -> None:
    if sys.stdout.isatty():  # a model may write what moves the cursor, or worse
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()

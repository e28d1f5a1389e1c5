"""Pages of dead letters: messages that no worker runs again unless a user queues them."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from starlette.responses import Response

from contract.redis.dead_letters import DeadLetter
from gateway.page.requests import prompt_of
from gateway.page.view import View
from producer.over_http import retry_letters

#: Matches the id of a queue batch; its group is the id of the batch, which has a page.
_PART_ID = re.compile(r"^(batch_[0-9a-f]{24})\.\d+$")
#: Most dead letters on a page, most that are read for it, and most bytes of a shown message.
PAGE, MAX_READ, SHOWN_BYTES = 50, 5000, 64 * 1024


def _visible(view: View, letters: list[DeadLetter]) -> list[DeadLetter]:
    """Return the letters of the caller's batches.

    Operators also get those without a batch, and those whose batch is gone.
    """
    ids = list({letter["batch_id"] for letter in letters if letter["batch_id"]})
    states = dict(zip(ids, view.services.batches.states(ids), strict=True))
    visible = []
    for letter in letters:
        batch = states.get(letter["batch_id"] or "")
        mine = batch is not None and view.caller.only_tenant in ("", batch.tenant)
        if mine or (batch is None and view.caller.operator):
            visible.append(letter)
    return visible


def show(view: View) -> Response:
    """Show the oldest dead letters that the caller may see."""
    letters = _visible(view, list(islice(view.services.batches.dead_letters(), MAX_READ)))
    shown = [_row(view, letter) for letter in letters[:PAGE]]
    return view.page("dead.html", letters=shown, total=len(letters))


def _row(view: View, letter: DeadLetter) -> dict[str, Any]:
    fits = letter["bytes"] <= SHOWN_BYTES
    message = view.services.batches.dead_message(letter["id"]) if fits else b""
    prompt = prompt_of(message)
    return {
        **letter,
        "page": _PART_ID.sub(r"\1", letter["batch_id"] or ""),
        "text": prompt or message.decode(errors="replace"),
        "too_large": not fits,
    }


def retry_or_delete(view: View) -> Response:
    """Queue the chosen dead letters again, or delete them."""
    batches = view.services.batches
    chosen = list(dict.fromkeys(value for name, value in view.form_list if name == "id"))
    ids = [letter["id"] for letter in _visible(view, list(batches.dead_letters(chosen)))]
    if not ids:
        return view.redirect("/ui/dead", notice="none")
    if view.form.get("do") == "delete":
        return view.redirect("/ui/dead", notice="deleted", n=batches.delete_dead(ids))
    return view.redirect("/ui/dead", notice="retried", n=retry_letters(batches, ids)[0])

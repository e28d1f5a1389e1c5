"""Dead letters: messages that were given up; looked at, queued again, or deleted."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from starlette.responses import Response

from contract.redis.dead_letters import DeadLetter
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.page.requests import prompt_of
from gateway.page.view import View

#: A batch that was made over HTTP has a batch of the queue for each model, which has no page.
_PART = re.compile(r"^(batch_[0-9a-f]{24})\.\d+$")
#: Letters in a page, those that are looked at for it, and bytes of one's message that are shown.
PAGE, LOOKED_AT, SHOWN_BYTES = 50, 5000, 64 * 1024


def _mine(services: Services, caller: Caller, letters: list[DeadLetter]) -> list[DeadLetter]:
    """Return those of the caller's batches; of no batch, or of one that is gone: an operator's."""
    ids = list({letter["batch_id"] for letter in letters if letter["batch_id"]})
    states = dict(zip(ids, services.batches.states(ids), strict=True))
    found = []
    for letter in letters:
        batch = states.get(letter["batch_id"] or "")
        if caller.operator if batch is None else batch.tenant == caller.tenant:
            found.append(letter)
    return found


def dead(view: View) -> Response:
    """Show the oldest dead letters that the caller may see."""
    services = view.services
    looked = list(islice(services.batches.dead_letters(), LOOKED_AT))
    letters = _mine(services, view.caller, looked)
    shown = [_shown(services, letter) for letter in letters[:PAGE]]
    return view.page("dead.html", letters=shown, total=len(letters), most=LOOKED_AT)


def _shown(services: Services, letter: DeadLetter) -> dict[str, Any]:
    fits = letter["bytes"] <= SHOWN_BYTES
    message = services.batches.dead_message(letter["id"]) if fits else b""
    prompt = prompt_of(message)
    return {
        **letter,
        "page": _PART.sub(r"\1", letter["batch_id"] or ""),
        "prompt": prompt,
        "raw": "" if prompt else message.decode(errors="replace"),
        "too_large": not fits,
    }


def change(view: View) -> Response:
    """Queue chosen letters again, or delete them."""
    chosen = list(dict.fromkeys(value for name, value in view.form_list if name == "id"))
    letters = _mine(view.services, view.caller, list(view.services.batches.dead_letters(chosen)))
    ids = [letter["id"] for letter in letters]
    if not ids:
        return view.to("/ui/dead", told="none")
    if view.form.get("do") == "delete":
        return view.to("/ui/dead", told="deleted", n=view.services.batches.delete_dead(ids))
    return view.to("/ui/dead", told="retried", n=view.services.batches.retry_dead(ids))

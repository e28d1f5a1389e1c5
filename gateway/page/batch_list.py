"""Page of the caller's batches: filtered by state, model, tenant and text, and sorted.

For a filter or an order the newest SEARCHED batches are read, and this module chooses among them:
a script in Redis would delay all other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args
from urllib.parse import urlencode

from starlette.responses import Response

from gateway.batches.api.record import Status
from gateway.page.batches import PAGE, batch_rows, watched
from gateway.page.view import View

#: Most batches that are read for a filter or an order, and most batches of one call.
SEARCHED, _AT_ONCE = 500, 100
#: Name of an order -> the value by which rows are sorted; None comes last. `left` sorts by
#: the time left, or by the time taken if the batch has ended.
ORDERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "state": lambda row: row["status"],
    "progress": lambda row: row["done"] / row["total"] if row["total"] else None,
    "rate": lambda row: row["rate"],
    "left": lambda row: row["seconds"] if row["ended"] else row["left_s"],
    "failed": lambda row: row["failed"],
    "tokens_in": lambda row: row["tokens_in"],
    "tokens_out": lambda row: row["tokens_out"],
    "created": lambda row: row["created_at"],
}


@dataclass(frozen=True, slots=True)
class BatchFilters:
    """The filters and the order of a list; `sort` begins with `-` for the highest first."""

    text: str = ""
    state: str = ""
    model: str = ""
    tenant: str = ""
    sort: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """Return the filters and the order in a query."""
        fields = {name: query.get(name, "").strip()[:200] for name in cls.__dataclass_fields__}
        if fields["sort"].removeprefix("-") not in ORDERS:
            fields["sort"] = ""
        return cls(**fields)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__dataclass_fields__)

    def query(self, **changed: object) -> str:
        """Return the query of this list with changes."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__} | changed
        return urlencode({name: value for name, value in fields.items() if value})

    def sorted_by(self, name: str) -> str:
        """Return the query of the list sorted by a column, highest first.

        If the list is sorted like this already, the lowest comes first.
        """
        return self.query(sort=name if self.sort == f"-{name}" else f"-{name}")

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row passes the filters."""
        texts = (row["id"], row["input"], row["name"], row["model"])
        return (
            self.state in ("", row["status"])
            and self.tenant in ("", row["tenant"])
            and self.model.casefold() in row["model"].casefold()
            and any(self.text.casefold() in str(text).casefold() for text in texts)
        )

    def choose(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows that pass, sorted."""
        passing = [row for row in rows if self.takes(row)]
        if self.sort:
            value = ORDERS[self.sort.removeprefix("-")]
            sortable = [row for row in passing if value(row) is not None]
            sortable.sort(key=value, reverse=self.sort.startswith("-"))
            passing = sortable + [row for row in passing if value(row) is None]
        return passing


def batches(view: View) -> Response:
    """Show a page of the caller's batches."""
    filters = BatchFilters.of(view.query)
    context: dict[str, Any] = {"page": 1, "more": False, "searched": 0}
    if filters:
        number = view.query.get("page", "1")
        page = max(1, int(number)) if number.isdecimal() and len(number) < 4 else 1
        read, more = _newest(view)
        chosen = filters.choose(read)
        rows = chosen[(page - 1) * PAGE : page * PAGE]
        context |= {"page": page, "more": len(chosen) > page * PAGE}
        context["searched"] = len(read) if more else 0
    else:
        rows, context["more"] = batch_rows(view, view.query.get("after", "")[:200], PAGE)
    return view.page(
        "batches.html", rows=rows, watched=watched(rows), filters=filters, states=get_args(Status),
        tenants=not view.caller.only_tenant, **context,
    )  # fmt: skip


def _newest(view: View) -> tuple[list[dict[str, Any]], bool]:
    """Return the newest SEARCHED batches as rows, and whether there are more."""
    rows: list[dict[str, Any]] = []
    more = True
    while more and len(rows) < SEARCHED:
        next_rows, more = batch_rows(view, rows[-1]["id"] if rows else "", _AT_ONCE)
        rows += next_rows
        more = more and bool(next_rows)
    return rows, more

"""Live pages are bounded by session and by tenant: one of them does not take all."""

from __future__ import annotations

from typing import Any

from gateway.http.caller import Caller
from gateway.page import live
from gateway.page.live import MOST_OF_SESSION, MOST_OF_TENANT, MOST_VIEWERS, Viewer, Watch


def watched(*viewers: tuple[str, str]) -> Watch:
    services: Any = None
    watch = Watch(services)
    watch._viewers.update(Viewer(tenant, (), session=session) for tenant, session in viewers)
    return watch


def refused(watch: Watch, tenant: str, session: str, key_id: str = "key_1") -> str | None:
    found = live._too_many(watch, Caller(tenant, key_id), session)
    if found is None:
        return None
    assert (found.status, found.headers["retry-after"]) == (503, "10")
    return found.message


def test_a_session_with_many_pages_takes_nobody_elses() -> None:
    watch = watched(*[("a", "s1")] * MOST_OF_SESSION)
    assert "this session" in str(refused(watch, "a", "s1"))
    assert refused(watch, "a", "s2") is None
    assert refused(watch, "b", "s3") is None


def test_a_tenant_with_many_sessions_takes_no_other_tenants() -> None:
    watch = watched(*(("a", f"s{n}") for n in range(MOST_OF_TENANT)))
    assert "this tenant" in str(refused(watch, "a", "new"))
    assert refused(watch, "b", "new") is None


def test_all_together_have_a_bound_and_without_keys_only_that() -> None:
    some = watched(*[("default", "")] * (MOST_VIEWERS - 1))
    assert refused(some, "default", "", key_id="") is None
    watch = watched(*((f"t{n % 9}", f"s{n}") for n in range(MOST_VIEWERS)))
    assert "too many" in str(refused(watch, "other", "new"))

"""What `doctor` prints about a tenant's records."""

from __future__ import annotations

from producer.cli.doctor.server import check_tenant_records
from producer.redis import TenantUsage


def test_the_kinds_of_records_have_their_plurals() -> None:
    kinds = {"file": 3, "batch": 1, "message_batch": 2}
    finding = check_tenant_records(TenantUsage("default", 5581, kinds, sampled=False), 10**9)
    assert finding.text.endswith(": 3 files, 1 batch, 2 message_batches")
    assert finding.facts["kinds"] == ["3 file", "1 batch", "2 message_batch"]

"""Names of Redis keys and channels; docs/reference/redis-keys.md describes each."""

from contract.naming import RESULT_PREFIX

LEASE_SEQ = "warmq:lease_seq"
#: A number in a name is the protocol that gave the key its form (contract/version.py).
LEASES = "warmq:leases:2"
SEQUENCES = "warmq:sequences"
WORKERS = "warmq:workers"
RETURNS = "warmq:returns"
DEATHS = "warmq:deaths"
DEAD = "warmq:dead"
REVOKED = "warmq:revoked"
SWEEP = "warmq:sweep"
TENANTS = "warmq:tenants"
BATCHES = "warmq:batches"
RETIRING = "warmq:retiring:2"
#: Written and removed within one script, which tests a user's rights.
SCRATCH = "warmq:scratch"
CANCEL_CHANNEL = "warmq:cancel"
BATCH_CANCEL_CHANNEL = "warmq:batch-cancel"


def suspects_list(queue: str) -> str:
    """Return the list of requests suspected of killing their engine."""
    return f"{queue}:suspects"


def worker_key(worker: str) -> str:
    """Return the hash of a worker's leases."""
    return f"warmq:worker:2:{worker}"


def batch_key(batch_id: str, part: str = "") -> str:
    """Return the batch hash, or one of its parts: index, finished, failed."""
    return f"warmq:batch:{batch_id}:{part}" if part else f"warmq:batch:{batch_id}"


def attempts_key(request_id: str) -> str:
    """Return the list of a request's attempts that brought no answer, the last one first."""
    return f"warmq:attempts:{request_id}"


def used_key(queue: str, hour: int) -> str:
    """Return the hash of the tokens that each tenant used of a queue in an hour since 1970."""
    return f"warmq:used:{queue}:{hour}"


def dead_key(letter_id: str) -> str:
    """Return the list that holds the message of a dead letter."""
    return f"{DEAD}:{letter_id}"


def result_key(request_id: str) -> str:
    """Return the key of a result, the one that Celery's Redis backend uses."""
    return RESULT_PREFIX + request_id

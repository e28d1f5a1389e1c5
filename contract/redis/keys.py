"""Defines names of Redis keys and channels; docs/reference/redis-keys.md describes each."""

from contract.naming import RESULT_PREFIX

LEASE_SEQ = "warmq:lease_seq"
#: A number in a name is the protocol (contract/version.py) in which the key got its format.
LEASES = "warmq:leases:2"
SEQUENCES = "warmq:sequences"
WORKERS = "warmq:workers"
RETURNS = "warmq:returns"
DEATHS = "warmq:deaths"
DEAD = "warmq:dead"
REVOKED = "warmq:revoked"
#: The number of lines that known answers have answered, by tenant.
REUSED = "warmq:reused"
SWEEP = "warmq:sweep"
SWAP_CLAIMS = "warmq:swap-claims"
SWAP_LEFT = "warmq:swap-left"
TENANTS = "warmq:tenants"
BATCHES = "warmq:batches"
RETIRING = "warmq:retiring:2"
#: The secret that signs the webhooks of `producer submit --notify`.
NOTIFY_SIGNING = "warmq:notify_secret"
#: Ended batches whose webhook is to be posted, and when.
NOTIFY = "warmq:gateway:due:notify"
#: A key that a script writes and removes to check the permissions of the Redis user.
SCRATCH = "warmq:scratch"
CANCEL_CHANNEL = "warmq:cancel"
BATCH_CANCEL_CHANNEL = "warmq:batch-cancel"


def suspects_list(queue: str) -> str:
    """Return the key of a queue's list of suspects: requests that may kill their engine."""
    return f"{queue}:suspects"


def worker_key(worker: str) -> str:
    """Return the key of the hash of a worker's leases."""
    return f"warmq:worker:2:{worker}"


def batch_key(batch_id: str, part: str = "") -> str:
    """Return the key of a batch's hash, or of a part, for example index, finished or columns."""
    return f"warmq:batch:{batch_id}:{part}" if part else f"warmq:batch:{batch_id}"


def attempts_key(request_id: str) -> str:
    """Return the key of the list of a request's attempts without an answer, latest first."""
    return f"warmq:attempts:{request_id}"


def used_key(queue: str, hour: int) -> str:
    """Return the key of the hash of tokens by tenant in one hour, counted from 1970."""
    return f"warmq:used:{queue}:{hour}"


#: The halves of a tenant's known answers, the newer one first.
HALVES = ("new", "old")


def known_key(tenant: str, half: str) -> str:
    """Return the key of the hash of one half of a tenant's known answers."""
    return f"warmq:known:{tenant}:{half}"


def machine_key(worker: str) -> str:
    """Return the key of a worker's memory and last log lines, as JSON."""
    return f"warmq:machine:{worker}"


def dead_key(letter_id: str) -> str:
    """Return the key of the list with the message of a dead letter."""
    return f"{DEAD}:{letter_id}"


def result_key(request_id: str) -> str:
    """Return the key of a request's result, as Celery's Redis backend makes it."""
    return RESULT_PREFIX + request_id

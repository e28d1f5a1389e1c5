"""Texts of stalls, each with its remedy; the page translates them."""

_SILENT = (
    "if it has ended, its requests in flight wait for the end of their leases, and nothing is "
    "lost: read the end of its log, and start it again"
)
#: Code -> text and remedy. Some codes have further entries: `queue_unserved` has `default_unserved`
#: for a queue whose name has no model, `workers_silent` has `worker_silent`, `lease_held` has
#: `lease_ends` and `lease_unswept`, and `deadline_late` has `deadline_lost`.
TEXTS = {
    "queue_unserved": (
        "no worker serves {model} (queue {queue}); requests waiting: {waiting}",
        "start a worker for it with the other settings of an earlier one (`{command}`), or cancel "
        "its batches and submit them with another --model",
    ),
    "default_unserved": (
        "no worker serves the queue {queue}; requests waiting: {waiting}",
        "start a worker for it with the other settings of an earlier one (`{command}` without "
        "WARMQ_SERVED_MODEL_NAME), or cancel its batches and submit them with --model",
    ),
    "servers_unreachable": (
        "the workers of {model} (queue {queue}) wait for their servers; requests waiting: "
        "{waiting}",
        "start the servers, or correct their addresses; the workers go on by themselves",
    ),
    "workers_degraded": (
        "no engine of {model} (queue {queue}) runs: each died and is being rebuilt; requests "
        "waiting: {waiting}",
        "the workers' logs have the reason",
    ),
    "workers_starting": (
        "the workers of {model} (queue {queue}) are starting; requests waiting: {waiting}",
        "the requests run when a worker is ready; the workers' logs have the progress",
    ),
    "workers_silent": (
        "all {count} workers of {model} (queue {queue}) have been silent for {silent} or longer",
        _SILENT,
    ),
    "worker_silent": (
        "worker {worker} of {model} (queue {queue}) has been silent for {silent}",
        _SILENT,
    ),
    "model_not_loaded": (
        "no worker has loaded {model} (queue {queue}) now; requests waiting: {waiting}",
        "a worker loads it when its own model has no work, or when a request has waited for "
        "max_wait (docs/how-to/several-models.md)",
    ),
    "model_unloadable": (
        "no worker can load {model} (queue {queue}); requests waiting: {waiting}",
        "correct its entry in WARMQ_MODELS, or free memory, and start the worker again; until then "
        "the worker tries again less and less often, and serves its other models",
    ),
    "workers_draining": (
        "the workers of {model} (queue {queue}) are stopping and take no more requests; requests "
        "waiting: {waiting}",
        "start another worker with `warmq-worker`",
    ),
    "tenant_capped": (
        "tenant {tenant} has as many requests of {model} in flight as its cap allows ({cap}); "
        "requests waiting: {waiting}",
        "`producer tenant set {tenant} --max-in-flight none` lifts the cap",
    ),
    "lease_held": (
        "a worker has died: its {count} requests of queue {queue} wait for the end of their "
        "leases, for at most {left}",
        "a worker of the queue runs them again then; nothing is lost",
    ),
    "lease_ends": (
        "a worker has died: its {count} requests of queue {queue} wait for the end of their "
        "leases, which can come any moment",
        "a worker of the queue runs them again then; nothing is lost",
    ),
    "lease_unswept": (
        "a worker has died: its {count} requests of queue {queue} wait until another worker runs",
        "start one with `warmq-worker`: it runs them again after one lease (WARMQ_LEASE_S); "
        "nothing is lost",
    ),
    "memory_full": (
        "Redis is full and refuses new requests: {percent} % of its maxmemory are used",
        "collect and `producer delete` finished batches, or raise maxmemory",
    ),
    "memory_high": (
        "Redis is above WARMQ_HIGH_WATER, so submit waits: {percent} % of its maxmemory are used",
        "collect and `producer delete` finished batches, or raise maxmemory",
    ),
    "queue_full": (
        "submit waits: {waiting} requests wait in queue {queue}, as many as "
        "WARMQ_HIGH_WATER_REQUESTS allows",
        "wait until workers have taken some, or set Redis's maxmemory",
    ),
    "no_worker": (
        "no worker runs; batches over HTTP that wait for one: {count}",
        "start one with `warmq-worker`; they go on by themselves",
    ),
    "submit_stopped": (
        "batch {batch} is submitted only in part: {lines} lines read, no more for {quiet}",
        "if its `producer submit` no longer runs, fix the file if it was refused; the same command "
        "with --batch-id {batch} queues the missing lines; or cancel the batch",
    ),
    "deadline_late": (
        "batch {batch} will miss its deadline by about {late} at today's rate",
        "about {needed} slots instead of {slots} meet it: start more workers, or cancel other "
        "batches; requests that have not ended by then expire",
    ),
    "deadline_lost": (
        "batch {batch} will miss its deadline by about {late} at today's rate",
        "more slots do not help: one request takes longer than the time left, or the tenant's cap "
        "is too low; requests that have not ended by then expire",
    ),
}
#: Codes of stalls that can end by themselves, or are perhaps no stalls.
PASSING = {
    "workers_starting", "model_not_loaded", "lease_held", "memory_high", "queue_full",
    "tenant_capped", "submit_stopped", "deadline_late",
}  # fmt: skip
#: Stalls during which submits wait.
SUBMITS_WAIT = {"memory_full", "memory_high", "queue_full"}

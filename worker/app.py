"""The Celery application: `celery -A worker.app worker --pool=solo`.

Celery provides the process, signals and control commands. Requests do not pass through its
consumer: the drain takes them, which worker/process/bootstep.py starts.
"""

import sys

from celery import Celery
from kombu import Queue

from contract.settings import Settings, SettingsError, load
from worker.process.bootstep import CONTROL_QUEUE, EngineStep
from worker.process.broker import celery_settings
from worker.process.control import Dispatcher, TaskEventsStep
from worker.process.program import Program, log_as_json, open_streams, set_option_defaults

open_streams()
try:
    # A starting worker checks its own settings; `celery inspect` needs Redis only.
    _settings = load(Settings)
except SettingsError as error:
    sys.exit(str(error))

_redis = celery_settings(_settings.redis_url.get_secret_value())

if _settings.log_format == "json":
    log_as_json()
set_option_defaults()
app = Celery("warmq")
app.Worker = app.subclass_with_self(Program)
app.events.dispatcher_cls = Dispatcher
app.conf.update(_redis)
app.conf.update(
    # Celery's consumer reads no queue, but without this one it would create its own.
    worker_consumer="worker.process.control:ControlConsumer",
    task_queues=[Queue(CONTROL_QUEUE)],
    task_default_queue=CONTROL_QUEUE,
    # JSON only: a pickled body is code from anybody who can write to Redis.
    accept_content=["json"],
    task_serializer="json",
    result_serializer="json",
    # Other apps in this database must not share kombu's lease keys with our control queue: the
    # shortest visibility timeout among them would win.
    broker_transport_options=_redis.get("broker_transport_options", {})
    | {
        "unacked_key": "warmq:control:unacked",
        "unacked_index_key": "warmq:control:unacked_index",
        "unacked_mutex_key": "warmq:control:unacked_mutex",
        # After so long Celery gives up a connection that does not answer, also when it stops.
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
    },
    # Wait for Redis without limit, also at the start: a worker outlives a Redis restart.
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # Also if Redis answers with an error, as a primary that became a replica does: otherwise
    # Celery ends the process with all requests in flight.
    broker_channel_error_retry=True,
    # Celery's pool never runs anything.
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # vLLM logs and prints; Celery would turn both into WARNINGs.
    worker_hijack_root_logger=True,
    worker_redirect_stdouts=False,
    worker_enable_remote_control=True,
    worker_send_task_events=False,
)
app.steps["worker"].add(EngineStep)
app.steps["consumer"].add(TaskEventsStep)

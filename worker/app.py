"""The Celery application: `celery -A worker.app worker --pool=solo`.

Celery gives us the process, signals and control commands. Requests do not pass
through its consumer: worker/process/bootstep.py starts the drain, which does.
"""

import sys

from celery import Celery
from kombu import Queue

from contract.settings import Settings, SettingsError, load
from worker.process.bootstep import CONTROL_QUEUE, EngineStep
from worker.process.broker import celery_settings
from worker.process.consumer import Dispatcher, TaskEventsStep
from worker.process.program import Program, log_as_json, open_streams, set_option_defaults

open_streams()
try:
    # The worker's own settings are checked when a worker starts: `inspect` needs only Redis.
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
    # Celery's own consumer reads no queue. Without one Celery would have one of its own; -Q is
    # refused (worker/process/bootstep.py).
    worker_consumer="worker.process.consumer:ControlConsumer",
    task_queues=[Queue(CONTROL_QUEUE)],
    task_default_queue=CONTROL_QUEUE,
    # JSON only: a pickled body is code from whoever can write to Redis.
    accept_content=["json"],
    task_serializer="json",
    result_serializer="json",
    # Our control queue must not share kombu's lease keys with other apps in the same database:
    # the shortest visibility timeout among them would win.
    broker_transport_options=_redis.get("broker_transport_options", {})
    | {
        "unacked_key": "warmq:control:unacked",
        "unacked_index_key": "warmq:control:unacked_index",
        "unacked_mutex_key": "warmq:control:unacked_mutex",
        # Celery notices a deaf connection, and leaves one when it stops, after so long.
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
    },
    # A worker that outlives a Redis restart: wait for ever, also at the start.
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # Also when it answers with an error, as a primary that was made a replica does:
    # else Celery ends the process, with all that is in flight.
    broker_channel_error_retry=True,
    # Nothing in Celery's pool is ever running, so there is nothing to cancel.
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # vLLM logs through logging and print; Celery would turn both into WARNINGs.
    worker_hijack_root_logger=True,
    worker_redirect_stdouts=False,
    worker_enable_remote_control=True,
    worker_send_task_events=False,
)
app.steps["worker"].add(EngineStep)
app.steps["consumer"].add(TaskEventsStep)

import worker.process.control  # noqa: E402, F401 - registers the control commands

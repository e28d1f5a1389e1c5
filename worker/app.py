"""The Celery application: `celery -A worker.app worker --pool=solo`.

Celery provides the process, signals and control commands. Requests do not pass through Celery's
consumer: worker/process/bootstep.py starts the drain (worker/drain), which takes them from Redis.
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

_redis_settings = celery_settings(_settings.redis_url.get_secret_value())

if _settings.log_format == "json":
    log_as_json()
set_option_defaults()
app = Celery("warmq")
app.Worker = app.subclass_with_self(Program)
app.events.dispatcher_cls = Dispatcher
app.conf.update(_redis_settings)
app.conf.update(
    # Celery's consumer reads no queue, but without `task_queues` Celery would create one.
    worker_consumer="worker.process.control:ControlConsumer",
    task_queues=[Queue(CONTROL_QUEUE)],
    task_default_queue=CONTROL_QUEUE,
    # Only JSON is accepted: unpickling a body would run code of anybody who can write to Redis.
    accept_content=["json"],
    task_serializer="json",
    result_serializer="json",
    # Other Celery apps in this database must not share kombu's `unacked` keys with this control
    # queue: the shortest visibility timeout among them would apply to all.
    broker_transport_options=_redis_settings.get("broker_transport_options", {})
    | {
        "unacked_key": "warmq:control:unacked",
        "unacked_index_key": "warmq:control:unacked_index",
        "unacked_mutex_key": "warmq:control:unacked_mutex",
        # Seconds after which Celery closes a connection that does not answer, also while stopping.
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
    },
    # Celery waits for Redis without a limit, also at its start: a worker survives Redis restarts.
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # Celery waits also if Redis answers with an error, for example because a primary became a
    # replica. Without this Celery would end the process, with all requests in flight.
    broker_channel_error_retry=True,
    # Celery's pool runs no tasks, so there are none to cancel.
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # vLLM logs and prints. Celery would log its prints as WARNINGs.
    worker_hijack_root_logger=True,
    worker_redirect_stdouts=False,
    worker_enable_remote_control=True,
    worker_send_task_events=False,
)
app.steps["worker"].add(EngineStep)
app.steps["consumer"].add(TaskEventsStep)

"""The worker process: a Celery worker whose bootstep drains the queue into one engine."""

"""The worker process: a Celery worker that takes requests from one queue and runs one engine."""

"""The Celery process around the drain: boot step, control commands, status."""

"""The worker's Celery process, which starts the drain and further front ends."""

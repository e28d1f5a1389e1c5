# The worker in front of OpenAI-compatible servers: neither vLLM nor torch. Built from the project's
# root: see compose.openai.yaml.
FROM python:3.11-slim-trixie

WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# The locked packages first: they rarely change and are most of the image.
COPY scripts/setup scripts/setup
COPY requirements requirements
RUN scripts/setup base openai traces

COPY pyproject.toml LICENSE ./
COPY contract contract
COPY worker worker
RUN scripts/setup base build

RUN useradd --create-home warmq
USER warmq
CMD ["celery", "-A", "worker.app", "worker", "--pool=solo", "--without-gossip", "--without-mingle", "--loglevel=INFO"]

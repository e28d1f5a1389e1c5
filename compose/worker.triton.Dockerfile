# The worker in front of Triton: neither vLLM nor torch, only the client and the tokenizer.
# Built from the project's root: see compose.triton.yaml.
FROM python:3.11-slim-trixie

WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# The locked packages first: they rarely change and are most of the image.
COPY scripts/setup scripts/setup
COPY requirements requirements
RUN scripts/setup base triton

COPY pyproject.toml LICENSE ./
COPY contract contract
COPY worker worker
RUN scripts/setup base build

# No root; at run time nothing is downloaded and nothing is reported.
RUN useradd --create-home warmq
USER warmq
ENV HF_HUB_OFFLINE=1
CMD ["celery", "-A", "worker.app", "worker", "--pool=solo", "--without-gossip", "--without-mingle", "--loglevel=INFO"]

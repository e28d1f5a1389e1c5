# The worker with vLLM's CPU build. Built from the project's root: see compose.yaml.
FROM python:3.11-slim-trixie

# libnuma1: vLLM's CPU kernels link to it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# The locked packages first: they rarely change and are most of the image.
COPY scripts/setup scripts/setup
COPY requirements requirements
RUN scripts/setup base gateway engine

COPY pyproject.toml LICENSE ./
COPY contract contract
COPY worker worker
RUN scripts/setup base build

# No root; at run time nothing is downloaded and nothing is reported.
RUN useradd --create-home warmq
USER warmq
# TORCHDYNAMO_DISABLE: vLLM's CPU sampler would be compiled at its first use, and there is no compiler.
# WARMQ_ENGINE_LOG: a container's log has vLLM's log too, and its disk gets no file.
ENV WARMQ_ENGINE_LOG=- HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TORCHDYNAMO_DISABLE=1
CMD ["celery", "-A", "worker.app", "worker", "--pool=solo", "--without-gossip", "--without-mingle", "--loglevel=INFO"]

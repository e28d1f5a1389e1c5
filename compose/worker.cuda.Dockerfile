# The worker with vLLM's CUDA 13 build. Built from the project's root: see compose.gpu.yaml.
# The driver (580 or newer) is the host's; everything else of CUDA comes with the locked packages.
FROM python:3.11-slim-trixie

# gcc: Triton compiles its launchers at their first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# The locked packages first: they rarely change and are most of the image, 10 GB.
COPY scripts/setup scripts/setup
COPY requirements requirements
RUN scripts/setup base gateway engine cuda

COPY pyproject.toml LICENSE ./
COPY contract contract
COPY worker worker
RUN scripts/setup base build

# No root; at run time nothing is downloaded and nothing is reported. The folder of compiled kernels
# belongs to the user before a volume is mounted on it.
RUN useradd --create-home warmq && install -d -o warmq -g warmq /home/warmq/.cache
USER warmq
# WARMQ_ENGINE_LOG: a container's log has vLLM's log too, and its disk gets no file.
ENV WARMQ_ENGINE_LOG=- HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
CMD ["celery", "-A", "worker.app", "worker", "--pool=solo", "--without-gossip", "--without-mingle", "--loglevel=INFO"]

# The worker for Rebellions NPUs. Built from the project's root: see compose.npu.yaml. The card's
# driver is the host's; the packages installed here must be of the release that fits that driver.
# Debian 13 (trixie), because vLLM's own wheel needs glibc 2.39. Never built: the
# vendor's index needs an account.
FROM python:3.11-slim-trixie

# libnuma1: vLLM's CPU kernels link to it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# warmq's own dependencies, checked by hash.
COPY scripts/setup scripts/setup
COPY requirements requirements
RUN scripts/setup base

# The vendor's three packages, of the same minor version; they install their vLLM, torch and
# transformers. The secret is an index URL with the account in it; without it the public index is tried.
RUN --mount=type=secret,id=rbln_index \
    index=$(cat /run/secrets/rbln_index 2>/dev/null || true); \
    .venv/bin/python -m pip install --extra-index-url "${index:-https://pypi.rbln.ai/simple}" "rebel-compiler==0.12.*" \
    && .venv/bin/python -m pip install --extra-index-url https://wheels.vllm.ai/0.30.0/cpu \
        --extra-index-url https://download.pytorch.org/whl/cpu "vllm-rbln==0.12.*" "optimum-rbln==0.12.*"

COPY pyproject.toml LICENSE ./
COPY contract contract
COPY worker worker
RUN scripts/setup base build

RUN useradd --create-home warmq
USER warmq
# WARMQ_ENGINE_LOG: a container's log has vLLM's log too, and its disk gets no file.
ENV WARMQ_ENGINE_LOG=- HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
CMD ["celery", "-A", "worker.app", "worker", "--pool=solo", "--without-gossip", "--without-mingle", "--loglevel=INFO"]

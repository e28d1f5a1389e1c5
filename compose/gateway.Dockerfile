# `producer serve`: no engine, so a small image. Built from the project's root.
FROM python:3.11-slim-trixie

WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

COPY scripts/setup scripts/setup
COPY requirements requirements
RUN scripts/setup base gateway traces

COPY pyproject.toml LICENSE ./
COPY contract contract
COPY producer producer
COPY gateway gateway
RUN scripts/setup base build

# The folder of files belongs to the user before a volume is mounted on it.
RUN useradd --create-home warmq && install -d -o warmq -g warmq /data/files
USER warmq
WORKDIR /data
CMD ["producer", "serve"]

# The command line `producer`, with tables and buckets: no engine, so a small image. Built from the project's root.
FROM python:3.11-slim-trixie

WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

COPY scripts/setup scripts/setup
COPY requirements requirements
RUN scripts/setup base traces tables buckets

COPY pyproject.toml LICENSE ./
COPY contract contract
COPY producer producer
COPY gateway gateway
RUN scripts/setup base build

RUN useradd --create-home warmq
USER warmq
WORKDIR /data
ENTRYPOINT ["producer"]

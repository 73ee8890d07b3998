# The verbs of this repository. Root on Debian 12 or Ubuntu 24.04 with Python 3.11+ is all they need.
.DEFAULT_GOAL := help
.PHONY: help setup setup-tests templates demo up down test test-slow test-firecracker test-nested check fmt gen bench docs clean

PYTHON := .venv/bin/python
STAMP := .venv/synced
DATA_DIR := $(or $(CPUOS_DATA_DIR),/var/lib/cpuos)
EXAMPLE := examples/seattle-weather
export UV_CACHE_DIR ?= $(DATA_DIR)/cache/uv-cache
GO_ENVIRONMENT := GOCACHE=$(DATA_DIR)/cache/go/build GOMODCACHE=$(DATA_DIR)/cache/go/mod GOPATH=$(DATA_DIR)/cache/go/path GOTOOLCHAIN=local GOFLAGS=-buildvcs=false CGO_ENABLED=0
# 0: the tests follow each other in one process. 2: as tests/lanes.py says.
TEST_PROCESSES ?= 0
# Lines of stdout and stderr come in the order in which they were written, in pipes too.
export PYTHONUNBUFFERED := 1

help: ## Show the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(STAMP): pyproject.toml uv.lock
	@uv=$$(scripts/bootstrap.sh) && scripts/retry.sh "$$uv" sync --quiet --frozen --all-extras
	@touch $@

setup: $(STAMP) ## Install and build what is missing on this machine
	@$(PYTHON) -m cpuos.setup

setup-tests: $(STAMP) ## As setup, and what only tests of microVMs need: QEMU and a guest kernel
	@$(PYTHON) -m cpuos.setup --microvm

templates: $(STAMP) ## Build all templates, also those that only some need
	@$(PYTHON) -m cpuos.setup --templates

demo: $(STAMP) ## Set up, start cpuOS, and analyse a real weather table in a sandbox
	@$(PYTHON) -m cpuos.setup --example
	@.venv/bin/cpuos up
	@.venv/bin/cpuos profile run python-data --input $(DATA_DIR)/cache/examples/seattle-weather.csv \
		--script $(EXAMPLE)/analysis.py --out evidence

up: $(STAMP) ## Set up what is missing and start cpuOS
	@.venv/bin/cpuos up

down: $(STAMP) ## Stop cpuOS and its sandboxes
	@.venv/bin/cpuos down

test: setup-tests ## Run the tests, on real sandboxes too
	@go=$$($(PYTHON) -m cpuos.setup --go) && cd guest && $(GO_ENVIRONMENT) "$$go" vet ./... && \
		$(GO_ENVIRONMENT) "$$go" test ./...
	$(PYTHON) -m pytest -n $(TEST_PROCESSES) -m "not slow"

test-slow: setup-tests ## Run the long lanes
	$(PYTHON) -m pytest -m slow --timeout 1800

test-firecracker: setup-tests ## The conformance suite in Firecracker, where CPUOS_FIRECRACKER and CPUOS_JAILER name it and KVM boots
	$(PYTHON) -m pytest -rs tests/unit/microvm/test_firecracker.py tests/unit/microvm/test_firecracker_saves.py tests/runtimes/test_firecracker_conformance.py

test-nested: setup-tests ## MicroVMs by KVM in a machine whose processor QEMU translates; in Firecracker too, where CPUOS_FIRECRACKER and CPUOS_JAILER name it
	$(PYTHON) -m pytest -rs tests/machine/test_nested.py

check: $(STAMP) ## Lint, and see that generated files are current
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	$(PYTHON) scripts/gen.py --check

fmt: $(STAMP) ## Format
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

gen: $(STAMP) ## Write generated files: plain client, OpenAPI, reference pages
	$(PYTHON) scripts/gen.py

bench: setup ## Measure against bare gVisor, as ratios
	$(PYTHON) -m benchmarks.run

docs: $(STAMP) ## Write the reference pages and run the code in the docs
	$(PYTHON) scripts/gen.py
	$(PYTHON) -m pytest tests/docs

clean: ## Remove what was made in this clone; the machine is cleaned by `cpuos uninstall --purge`
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist evidence guest/cpuos-agent
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

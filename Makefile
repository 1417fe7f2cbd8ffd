# `make train` and `make test` do all set-up on a machine with Python >= 3.11 and make.

PYTHON ?= python3
BIN := .venv/bin
ifndef RUN_DIR
RUN_DIR := runs/minatar-breakout-$(shell date +%Y%m%d-%H%M%S)
endif
WORKERS ?= 2
STEPS ?= 1_000_000
NAME ?= classic

.PHONY: setup train reproduce test test-all lint format docs bench bench-gpu clean

# Everything: all environments, tests, documentation. `make train` installs less.
setup: .venv/ready

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "podrace needs Python >= 3.11, this is " + sys.version + "; say make PYTHON=python3.12, for example")'
	$(PYTHON) -m venv .venv

# Installs podrace with the extra $(1) at the pinned versions. uv takes seconds; pip, where there is no uv, minutes.
define install
	@$(BIN)/uv --version > /dev/null 2>&1 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv || true
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[$(1)]' \
	  || { echo 'uv could not install podrace. Installing with pip, which takes minutes.'; \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(1)]'; }
endef

# Order only: the file's time is that of the interpreter, which is older than pyproject.toml.
.venv/gymnax: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,gymnax)
	touch $@

.venv/ready: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,dev)
	touch $@ .venv/gymnax

train: .venv/gymnax
	$(BIN)/podrace train minatar-breakout --total-steps $(STEPS) --run-dir $(RUN_DIR)
	@echo "here podrace is:  $(BIN)/podrace"
	@echo "train the full preset (3 minutes, a return of 25 to 90): make train STEPS=10_000_000"
	@echo "or something new: $(BIN)/podrace train        (IMPALA on Catch, seconds)"

# Trains, evaluates and records a suite, or goes on with it, and writes its page: make reproduce NAME=minatar
reproduce: setup
	$(BIN)/podrace reproduce $(NAME)
	$(BIN)/podrace reproduce $(NAME) --page docs/results/$(NAME).md

test: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow'

# It compiles as users do; `make test` compiles without optimisations, see tests/conftest.py.
test-all: setup
	XLA_FLAGS='$(XLA_FLAGS)' $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, in build/site: open build/site/index.html. Neither building nor reading it needs a network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

BENCHMARKS := ppo_cartpole catch_podracer environments resets scores

# Hours. Each script writes benchmarks/results/NAME.json; benchmarks/README.md lists those that need more than `make setup`.
bench: setup
	@echo "runs, one after the other: $(BENCHMARKS)"
	for b in $(BENCHMARKS); do echo "== $$b"; $(BIN)/python benchmarks/$$b.py || exit 1; done

# 13 minutes on one GPU, without a network: benchmarks/gpu/bench.sh. JAX with CUDA must be there.
bench-gpu:
	sh benchmarks/gpu/bench.sh $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

clean:
	rm -rf .venv build runs

# make demo       set up, train an agent, look at it
# make test       lint, types, all tests (minutes)
# make test-slow  learning curves and measurements (an hour or more)
# make learn-quick  every algorithm on a small task, two seeds each (under an hour on two cores); the table is in build/learn-quick

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
EXTRAS ?= train,serve,remote,atari,mujoco,multiagent,data,tune,dev
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Byte code is wanted: without it every start of Python recompiles the libraries.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup system box2d demo test test-fast test-slow learn-quick lint types format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@PYTHON=$(PYTHON) tools/install $(VENV) $(EXTRAS)
	@touch $@ $(DEMO_STAMP)

# The demo needs neither Ray nor Atari nor the developers' tools.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@PYTHON=$(PYTHON) tools/install $(VENV) train,serve
	@touch $@

# Debian packages that tests need, where there is root; none is needed to train.
system:
	@grep -v '^#' system-packages.txt | xargs -r -n1 sh -c 'dpkg -s "$$0" >/dev/null 2>&1 || echo "$$0"' > .missing-packages; \
	if [ -s .missing-packages ] && [ "$$(id -u)" = 0 ]; then apt-get update -qq && xargs apt-get install -y -qq < .missing-packages; fi; \
	rm -f .missing-packages

# LunarLander and friends: their physics is compiled here, with swig from the package index.
box2d: setup
	$(BIN)/pip install -q -c constraints.txt swig setuptools wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q -c constraints.txt --no-build-isolation box2d-py

demo: $(DEMO_STAMP)
	@$(BIN)/python examples/demo.py

# Types are checked beside the tests, which often wait; what is wrong with them is printed at the end.
test: setup system lint
	@mkdir -p build; $(BIN)/mypy > build/types.txt 2>&1 & mypy=$$!; \
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist loadfile; tests=$$?; \
	wait $$mypy; types=$$?; cat build/types.txt; exit $$((tests | types))

test-slow: setup
	$(BIN)/python -m pytest -m slow -n 1

learn-quick: setup
	$(BIN)/python -m benchmarks.learning --quick --jobs 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

PYTHON ?= python3
QUESTION ?= Sort these numbers: 41 7 88 23

# Another Python has an environment of its own: `make test PYTHON=python3.12`.
VENV := .venv$(patsubst %,-%,$(filter-out python3,$(notdir $(PYTHON))))
OLDEST := .venv-oldest
RUNTIME := $(VENV)/runtime.stamp
DEV := $(VENV)/dev.stamp

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest bench gpu gpu-page lint docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: $(RUNTIME) ## answer a question with the model inside the package
	$(VENV)/bin/jackfield generate --chat "$(QUESTION)"

# Two files at a time, each on one thread: threads of torch that share a core wait for each other.
# In the order of the folders: files of one long test (a tutorial) last would leave a core idle.
IN_PAIRS := -q -n 2 --dist loadfile --no-loadscope-reorder --benchmark-disable
test test-oldest: export OMP_NUM_THREADS := 1

test: $(DEV) ## run the tests
	$(VENV)/bin/pytest $(IN_PAIRS)

test-all: test ## run the tests, the long ones too
	$(VENV)/bin/pytest -q -m "long or hypothesis" --hypothesis-profile many --timeout 1800

test-oldest: $(OLDEST)/test.stamp ## run the tests on the oldest supported libraries
	$(OLDEST)/bin/pytest $(IN_PAIRS)

bench: $(DEV) ## run the benchmarks
	$(VENV)/bin/pytest -q --benchmark-only tests/benchmarks

# Nothing is installed for it: a machine with a GPU may have no network. Its own Python has torch with CUDA.
GPU_OUT ?= build/gpu
GPUCHECK = PYTHONPATH=tests/gpu $(PYTHON) -m gpucheck

gpu: ## run all that waits for a GPU, in ten minutes; without one, list it
	$(GPUCHECK) --out $(GPU_OUT)

gpu-page: ## write docs/gpu.md from what `make gpu` found
	$(GPUCHECK) --page $(GPU_OUT)/gpu.json

lint: $(DEV) ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(DEV) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean: ## remove everything that these targets made
	rm -rf .venv .venv-* build dist site .benchmarks .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find core plugins tests tools -name __pycache__ -type d -exec rm -rf {} +

# pip is the last thing that `venv` writes, so an interrupted set-up starts again.
$(VENV)/bin/pip $(OLDEST)/bin/pip:
	$(PYTHON) -m venv $(@D)/..

$(RUNTIME): pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(VENV)/bin/python -m pip install -c constraints.txt -e .
	touch $@

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[dev]"
	$(VENV)/bin/python -m pip install -c constraints.txt setuptools wheel
# The one dependency without wheels. Where it cannot be built, all else works: what needs it is skipped.
	$(VENV)/bin/python -m pip install -c constraints.txt --no-build-isolation -e ".[gptq]" \
		|| echo "make: gptqmodel could not be built, so the tests of the quantizer gptq will be skipped"
	touch $(RUNTIME) $@

$(OLDEST)/test.stamp: pyproject.toml constraints-oldest.txt | $(OLDEST)/bin/pip
	$(OLDEST)/bin/python -m pip install -c constraints-oldest.txt -e ".[accelerate,structured,test]"
	touch $@

# make demo | test | unit | check | clean. The first of them makes .venv, later ones reuse it. Paths are relative, so the folder's own
# path may hold spaces. CXX=... and PYTHON=... name another compiler or interpreter; pip's own settings say where packages come from.

export GGML_NO_BACKTRACE := 1
export OMP_WAIT_POLICY := passive

ifeq ($(origin QUANTKIT_CORPUS_DIR),undefined)
ifneq ($(wildcard ../shared/corpus/.),)
export QUANTKIT_CORPUS_DIR := $(CURDIR)/../shared/corpus
endif
endif

floors := core spec measure engine job report cli
hash := \#
python := .venv/bin/python
# Written last, with the folder it is for: after a failed set-up, a move or a copy of the folder, the next run mends .venv.
stamp := .venv/.ready
is_usable = import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
venv_stands := $(shell [ "$$(cat $(stamp) 2>/dev/null)" = "$$(pwd -P)" ] && $(python) -c "" 2>/dev/null && echo yes)

pythons = $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python)
find_python = $(shell for p in $(pythons); do "$$p" -c '$(is_usable)' >/dev/null 2>&1 && echo "$$p" && break; done)
no_python = expected Python >= 3.11 with its venv module, found none (tried $(pythons)): install it, or pass PYTHON=/path/to/python3

compilers = $(if $(filter default undefined,$(origin CXX)),c++ g++ clang++,"$(CXX)")
find_compiler = $(shell for c in $(compilers); do echo '$(hash)include <thread>' | $$c -x c++ -std=c++17 -fsyntax-only - >/dev/null 2>&1 \
  && echo "$$c" && break; done)
no_compiler = expected a C++ compiler to build llama.cpp with, found none that works (tried $(compilers)): install one, for \
  example g++, or pass CXX=/path/to/c++

.PHONY: help demo test unit check clean FORCE

help:
	@echo "make demo    run the main job on the bundled model and text; the report is left in demo-run/report"
	@echo "make test    run the tests"
	@echo "make unit    run only the quick ones of each floor, in seconds"
	@echo "make check   run ruff, mypy and the test of the floors"
	@echo "make clean   remove what these leave behind, except .venv"

demo: $(stamp)
	.venv/bin/quantkit demo -o demo-run

test: $(stamp)
	$(python) -m pytest

unit: $(stamp)
	$(python) -m pytest -m "not engine and not browser and not system and not slow" $(floors:%=tests/%)

check: $(stamp)
	$(python) -m ruff check .
	$(python) -m mypy
	$(python) -m pytest tests/test_floors.py

clean:
	rm -rf demo-run build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(stamp): pyproject.toml $(if $(venv_stands),,FORCE)
	$(eval found := $(find_python))$(if $(found),,$(error $(no_python)))
	$(if $(find_compiler),,$(error $(no_compiler)))
	@rm -f $(stamp)
	@echo "making .venv: llama.cpp is compiled from source, about 3 minutes the first time"
	@$(python) -m pip --version >/dev/null 2>&1 && $(python) -c '$(is_usable)' || "$(found)" -m venv --clear .venv
	@$(python) -m pip install --quiet --disable-pip-version-check --no-input -e '.[dev]'
	@pwd -P > $(stamp)
	@echo "made .venv"

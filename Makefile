# Entry points: a thin layer over the CMake presets, which CONTRIBUTING.md describes. Programs run in the directory
# where make was called, so relative file names in ARGS work.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
FERRY := $(ROOT)/build/tools/tools/ferry
ARGS ?=
# The kernels take half of the build, so `make demo`, `bench` and `doctor` compile them only where a GPU is found, or if
# CUDA=ON is given on the command line. The environment's CUDA is ignored: other programs give it other meanings.
ifneq ($(origin CUDA),command line)
  CUDA = $(shell if nvidia-smi -L >/dev/null 2>&1 || [[ -e /dev/nvidiactl ]]; then echo AUTO; else echo OFF; fi)
endif

.PHONY: help demo bench doctor test check lint docs format wheels clean tool

help: ## show this list
	@echo 'Ferry: expert-parallel dispatch and combine. Targets:'
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1|\2/p' '$(ROOT)/Makefile' | while IFS='|' read -r name text; do \
	  printf '%-14s %s\n' "$$name" "$$text"; done
	@echo 'Pass options in ARGS, for example:  make bench ARGS="--op pair --ranks 8"   make demo ARGS=--help'
	@echo 'demo, bench and doctor leave CUDA out where there is no GPU; to compile it there:  make demo CUDA=ON'

demo: tool ## run a Mixture-of-Experts layer over rank processes and check it against the dense layer
	@'$(FERRY)' demo $(ARGS)

bench: tool ## measure route, dispatch and combine, with the copy limit measured in the same run
	@'$(FERRY)' bench $(ARGS)

doctor: tool ## show what this machine offers, what is missing, and what to do about it
	@'$(FERRY)' doctor $(ARGS)

test: ## build optimised and run all tests, and those of the Python packages (ARGS="asan": only that preset)
	@'$(ROOT)/scripts/setup.sh' test
	@'$(ROOT)/scripts/test.sh' $(ARGS)

check: ## everything that a commit must pass: lint, documentation, tests, wheels, sanitizers by clang, fuzz targets
	@'$(ROOT)/scripts/setup.sh' lint
	@'$(ROOT)/scripts/setup.sh' docs
	@'$(ROOT)/scripts/test.sh' release docs python wheels asan fuzz tsan lint

lint: ## check format, comments, shell scripts, links and tables of the documentation, Python, names of changed code
	@'$(ROOT)/scripts/setup.sh' lint
	@'$(ROOT)/scripts/lint.sh' check $(ARGS)

docs: ## build the documentation site and print its address; any warning is an error
	@'$(ROOT)/scripts/setup.sh' docs
	@'$(ROOT)/scripts/docs.sh'

format: ## format all C++ and Python files in place
	@'$(ROOT)/scripts/setup.sh' lint
	@'$(ROOT)/scripts/lint.sh' format

wheels: ## build the wheels of ferry-ep and deep_ep into build/wheels (ARGS=--test: use them, too)
	@'$(ROOT)/scripts/wheels.sh' $(ARGS)

clean: ## remove everything that was built
	rm -rf '$(ROOT)/build'

# The ferry command alone. It needs no test packages, and a compiler's new warnings do not stop it.
tool:
	@'$(ROOT)/scripts/setup.sh' build
	@cmake -S '$(ROOT)' --preset tools '-DFERRY_CUDA=$(CUDA)' --log-level=WARNING >/dev/null
	@cmake --build '$(ROOT)/build/tools' --target ferry_command

# SPDX-License-Identifier: MIT
# `make run` and `make test` set up what they need; all output goes to build/.

PYTHON ?= python3
BUILD := build
VENV := $(BUILD)/venv
VPY := $(VENV)/bin/python
# Extra arguments for the program that `run`, `bench` or `test-gpu` starts, for example ARGS="--backend host".
ARGS ?=

# The demo's model, converted once.
MODEL = import sys; from pyvmem.serve.model import model_folder; \
	print(model_folder(notify=lambda text: print(text, file=sys.stderr)))

export VMEM_CACHE_DIR ?= $(CURDIR)/$(BUILD)/cache

.DEFAULT_GOAL := help
.PHONY: help all lib setup run run-vllm check test test-long test-kernel kernel-test test-driver test-gpu bench lint docs dist deb \
	install uninstall clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

all: lib setup ## the C library and the Python environment

lib: ## the C library: build/lib
	@$(MAKE) --no-print-directory -C libvmem all

setup: ## the Python environment build/venv with this project in it
	@$(PYTHON) scripts/environment.py

run: setup ## serve prompts with a real model on the best back end; ARGS=... for options
	$(VENV)/bin/vmem serve-demo --picture $(BUILD)/run.svg $(ARGS)

run-vllm: setup ## two vLLM engines that share memory and take turns, on the CPU; ARGS=... for options
	@$(VPY) scripts/vllm_setup.py
	@model=$$($(VPY) -c '$(MODEL)') && $(BUILD)/vllm/bin/python examples/vllm_share.py "$$model" $(ARGS)

check: export WERROR := 1
check: setup ## after a change, about 2 minutes: lint, C tests, the fast Python tests
	@$(VPY) scripts/run_tests.py lint c python-fast

test: setup ## every test this machine can run (half an hour on 2 cores); FROM=stage resumes there
	@$(VPY) scripts/run_tests.py $(if $(FROM),--from $(FROM))

test-long: setup ## make test, and the tests marked `long`
	@$(VPY) scripts/run_tests.py --long $(if $(FROM),--from $(FROM))

test-kernel: setup ## the patched driver on software GPUs, in virtual machines (a part of make test)
	@$(VPY) scripts/run_tests.py kernel

kernel-test: setup ## run one kernel test and show its output: T=name; without T, list the tests
	@$(VPY) scripts/kernel_setup.py
	@$(VPY) tests/kernel/suite.py $(if $(T),--show '$(T)',--list)

test-driver: setup ## the tests required for a driver branch: DRIVER=version NV_SRC=source; KERNEL= RECORD=file.json
	@$(VPY) scripts/kernel_setup.py
	@$(VPY) tests/kernel/suite.py --driver $(DRIVER) $(if $(KERNEL),--kernel $(KERNEL)) $(if $(RECORD),--record $(RECORD)) $(T)

test-gpu: setup ## the tests that need a GPU: the suite on the back ends stock and cuda, and tests/gpu
	@$(VPY) scripts/run_tests.py --gpu $(ARGS)

bench: setup ## the benchmarks; a machine without a GPU measures only the back end host
	$(VENV)/bin/vmem bench api $(ARGS)

lint: setup ## ruff, mypy --strict, shellcheck, hadolint, clang-format, generated tables
	@$(VPY) scripts/run_tests.py lint

docs: ## the documentation site: build/site/index.html
	@$(PYTHON) scripts/docs_site.py

dist: setup ## sdist, wheel, SBOM and checksums: dist/
	@$(VPY) scripts/dist.py

deb: setup ## the Debian packages, source and binary: dist/deb
	@$(VPY) scripts/deb.py

install: ## libvmem, its header, vmem.pc, CMake's package, man pages; PREFIX=/usr/local DESTDIR=
	@$(MAKE) --no-print-directory -C libvmem install

uninstall: ## remove what install installed
	@$(MAKE) --no-print-directory -C libvmem uninstall

module: ## the patched nvidia-uvm.ko; NV_SRC=driver source, KDIR=kernel build folder, NVIDIA_KO=
	@$(PYTHON) scripts/module_build.py

load: ## as root: load the patched module and run `vmem selftest`; undone on failure; ALLOW=
	@$(PYTHON) scripts/module_load.py load

unload: ## as root: restore the stock module
	@$(PYTHON) scripts/module_load.py unload

dkms: ## the patched module as a DKMS package: build/kernel/dkms
	@$(PYTHON) scripts/module_dkms.py package

install-module: ## as root: install the patched module with DKMS, for this and later kernels
	@$(PYTHON) scripts/module_dkms.py install

uninstall-module: ## as root: remove the patched module; the stock module is used again
	@$(PYTHON) scripts/module_dkms.py uninstall

clean: ## remove build/ and what builds leave in the tree
	rm -rf $(BUILD) dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis pyvmem/_vmem*.so pyvmem/_vmem.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

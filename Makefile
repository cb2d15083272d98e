# One door to everything. No root needed: all that is installed goes into .venv.
.DEFAULT_GOAL := help
SHELL := bash
READY := .venv/.ready
READY_BENCH := .venv/.ready-bench
READY_SERVERS := .venv/.ready-servers
READY_SPARK := .venv/spark.jsa
SOURCES := $(wildcard src tests tools demo bench examples)

# Hundreds of child processes import the same modules: compiled once, each of them starts in half the processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo serve docs test check pythons soak bench fmt clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv from the lock files (once; again when they change)

$(READY): requirements-build.lock requirements.lock pyproject.toml tools/setup.sh
	@tools/setup.sh
	@touch $@

$(READY_BENCH): requirements-bench.lock $(READY)
	@.venv/bin/python -m pip install --quiet --require-hashes -r requirements-bench.lock
	@touch $@

$(READY_SERVERS): requirements-servers.lock requirements-node.lock tests/blobs/azurite/package-lock.json \
		tests/broker/generated/package-lock.json tools/setup_servers.sh $(READY)
	@tools/setup_servers.sh
	@touch $@

# Spark starts many times in a run of the tests: its classes are read and checked once.
$(READY_SPARK): tests/support/archive.py tests/support/jvm.py $(READY)
	@echo "making an archive of Spark's classes, once: with it the JVMs of tests start sooner"
	@.venv/bin/python -m tests.support.archive >.venv/spark-archive.log 2>&1 || \
		echo "no whole archive of Spark's classes (.venv/spark-archive.log says why): tests run, only slower"

demo: $(READY) ## show Forebay at work, start to finish
	@.venv/bin/python -m demo

serve: $(READY) ## serve topics over HTTP, with one to look at, until Ctrl-C
	@.venv/bin/python -m forebay.cli serve --demo

docs: $(READY) ## build the documents as a site in build/site; any warning fails
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict
	@echo "build/site/index.html is the first page; for its search: .venv/bin/python -m http.server -d build/site"

test: $(READY) ## every check there is: lint, format, types, import contracts, docs, all tests
	@$(MAKE) --no-print-directory --jobs=2 $(READY_SERVERS) $(READY_SPARK)
	@tools/run_tests.sh all

check: $(READY) ## the quick checks: lint, types, contracts, tests that are neither slow nor Spark
	@tools/run_tests.sh quick

pythons: $(READY) ## the quick tests with Python 3.12 and 3.13, as far as they are on this machine
	@tools/other_pythons.sh

soak: $(READY_SERVERS) $(READY_SPARK) ## the randomised tests again, for long
	@FOREBAY_SOAK=1 .venv/bin/python -m pytest -n 2 --dist loadgroup

bench: $(READY_BENCH) $(READY_SERVERS) ## measure Forebay beside its peers
	@.venv/bin/python -m bench

fmt: $(READY) ## format the code and apply the safe fixes
	@.venv/bin/ruff check --fix --quiet $(SOURCES) || true
	@.venv/bin/ruff format $(SOURCES)

clean: ## remove .venv, caches and build output
	@rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

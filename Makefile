# Targets for newcomers: `make demo`, `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
JOBS ?= $(shell nproc)

# Each worker has half of the tests in their order, and takes from another when it is done: what modules share is made once.
PYTEST := $(BIN)/python -m pytest -q -n auto --dist worksteal
# Test modules are compiled by pytest (its assertions), 4 s of each worker: kept for the next run whatever the shell says.
test test-thorough test-all test-core test-extensions test-quick mutants: export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-thorough test-all test-core test-extensions test-quick mutants sweep docs lint format dist release-notes clean

demo: $(RUN)
	$(BIN)/python examples/demo.py

test: $(DEV)
	$(PYTEST) -m "not thorough and not long"

# What CI runs after `make test`: longer runs of what is tested there, and further kinds.
test-thorough: $(DEV)
	$(PYTEST) -m "thorough and not long"

test-all: $(DEV)
	$(PYTEST)

# The core's tests in processes that refuse every extension, cascade attention, recurrent layers and transports.
test-core: $(DEV)
	SPECDEC_REFUSE_EXTENSIONS=1 $(PYTEST) -m "not slow and not thorough and not long" tests/attention tests/drafters tests/specdec \
	    --ignore=tests/specdec/extensions --ignore=tests/attention/cascade --ignore=tests/attention/recurrence \
	    --ignore=tests/attention/transport

# Each extension's tests in processes that refuse all others but those that its row of EXTENSIONS names.
test-extensions: $(DEV)
	for name in attached batches grammars handoff head_check parallel rollouts server service training; do \
	    SPECDEC_REFUSE_EXTENSIONS=$$name $(PYTEST) -m "not slow and not thorough and not long" tests/specdec/extensions/$$name || exit 1; \
	done

# The logic of a round, and a test end to end of each family of heads: while one works.
QUICK := tests/attention/batch tests/attention/cache tests/drafters/loops tests/drafters/test_conformance.py \
    $(addprefix tests/specdec/,acceptance engine options requests rounds)
test-quick: $(DEV)
	$(PYTEST) -m "not slow and not thorough and not long" $(QUICK)

# Edits of tests/mutants/mutants.toml, each on its own: the tests named for it must fail.
mutants: $(DEV)
	$(BIN)/python -m tests.mutants.run --jobs $(JOBS) --json build/mutants.json

sweep: $(DEV)
	$(BIN)/python -m benchmarks.sweep --jobs $(JOBS) --out benchmarks/results/sweep.json

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into build/site: what is written from code first, then a strict build.
docs: $(DEV)
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python docs/scripts/command_line.py
	$(BIN)/python docs/scripts/pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: $(DEV)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Wheel and sdist in dist/, with their metadata checked as the package index would.
dist: $(DEV)
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# The section of CHANGELOG.md for the version in pyproject.toml.
release-notes:
	@awk -v heading="## [$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)]" \
	    '/^## /{found = index($$0, heading) == 1; next} found' CHANGELOG.md

$(RUN): PACKAGE := .
$(DEV): PACKAGE := .[dev]
$(RUN) $(DEV): pyproject.toml
	@echo "Installing into $(VENV); torch is large, this may take some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e "$(PACKAGE)"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info

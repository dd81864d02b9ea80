# Every target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-slow check format bench build docs constraints clean

demo: $(READY)  ## Learn the embedded digits with five methods (a minute) and write runs/demo/report.html.
	$(BIN)/cofima demo

# One process a core, each with one thread: more threads than cores only wait for each other.
test: export OMP_NUM_THREADS = 1
# Tests start many processes: compiled files are kept for those that follow.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)  ## Run the tests on all cores and show the slowest twenty; COVERAGE=yes shows the coverage, for half the time more.
	$(BIN)/pytest -m "not slow" -n auto --maxprocesses 8 --dist worksteal --durations 20 $(if $(COVERAGE),--cov --cov-report=term)

test-slow: $(READY)  ## Run the tests that take minutes, also those of other frameworks' callbacks.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,transformers,lightning,avalanche,peft]"
	$(BIN)/pytest -m slow

check: $(READY)  ## Formatting, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Measure speed as ratios and write benchmarks/RESULTS.md.
	$(BIN)/python benchmarks/run.py

build: $(READY)  ## Build the wheel and the source archive into dist/.
	rm -rf dist
	$(BIN)/python -m build --no-isolation

docs: $(READY)  ## Build the documentation into site/; needs no network once it is set up.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict --quiet

constraints: $(READY)  ## Record the versions that are installed now.
	$(BIN)/pip freeze --exclude-editable --exclude cofima | grep -v -e "@" > constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("cofima needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv runs dist site .coverage .pytest_cache .mypy_cache .ruff_cache

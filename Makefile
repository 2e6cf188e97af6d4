# make demo, test, quick, thorough, newest, torture, bench, docs, lint, lock or release-check: each first installs what it needs into .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# the releases that a clone is tested with, for this version of Python: a new release of a library cannot break a fresh clone
LOCK = $(wildcard constraints/$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt)
# processes of the tests: each imports all libraries and makes the fixtures of its tests, so a third is no gain on two processors
WORKERS ?= 2
CHECKED := longseq.attention,longseq.encoders,longseq.tasks,longseq.training,longseq.reports,longseq.deploy,datamodules.images,datamodules.decoding.image_files,datamodules.sets.mnist,datamodules.sets.vowels
# install what the extra asks for: with uv, if it is there and reaches its registry, in a fifth of pip's time
install = $(if $(LOCK),export PIP_CONSTRAINT="$(CURDIR)/$(LOCK)"; export UV_CONSTRAINT="$$PIP_CONSTRAINT" UV_BUILD_CONSTRAINT="$$PIP_CONSTRAINT";) \
	$(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python --editable '.$(1)' ||) \
	$(BIN)/pip install --quiet --editable '.$(1)'

.PHONY: demo test quick thorough newest gpu torture bench docs lint lock release-check clean

demo: $(VENV)/.installed
	$(BIN)/python train.py fit --config configs/image/digits.yaml
	$(BIN)/python train.py fit --config configs/audio/vowels.yaml
	@echo "curves, confusion matrices, pictures and sounds: $(BIN)/python train.py board"

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# runs all tests, those of `make test` and those that take long and show further cases of the same; it also checks the
# shapes and types of the calls, where tensors have shapes, which takes a fifth more time
thorough: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "" --jaxtyping-packages=$(CHECKED),beartype.beartype

# make test with the newest release of every library, in an environment of its own
newest:
	rm -rf .venv-newest
	$(MAKE) VENV=.venv-newest LOCK= test

# takes a minute: the tests of formulas, interfaces and contracts, without a training
quick: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix tests/, \
		attention/test_formulas.py attention/test_lengths.py attention/test_mixer.py attention/test_plug.py \
		attention/test_projections.py cli/test_names.py datamodules/test_order.py datamodules/test_splits.py \
		encoders/test_image.py encoders/test_patches.py encoders/test_resize.py encoders/test_spectrogram.py \
		training/test_classifier.py)

# compiled trainings, CUDA graphs and kernels, which need a GPU
gpu: $(VENV)/.installed-test
	TESTS_GPU=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 6 -m needs tests/training/test_on_gpu.py

torture: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 TORTURE=200 $(BIN)/python -m pytest -n 2 tests/faults -m "" -k "random_moments or whenever_its_writer"

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/peers.py

# site/index.html; a link that leads nowhere is an error
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# constraints/3.11.txt and constraints/3.12.txt: the newest releases that fit together; make newest shows whether they work
lock: $(VENV)/.installed
	$(BIN)/pip install --quiet uv
	for version in 3.11 3.12; do \
		$(BIN)/uv pip compile --quiet --upgrade --all-extras --python-version $$version --python-platform linux \
			--no-annotate --no-header --output-file constraints/$$version.txt pyproject.toml || exit; \
	done

# build the wheel of what is committed, and use it in an empty environment of PYTHON
release-check:
	rm -rf build/release && mkdir -p build/release/source
	git archive HEAD | tar -x -C build/release/source
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/release build/release/source
	.ci/release-check build/release/longseq-*.whl $(PYTHON)

$(VENV)/.installed: pyproject.toml $(LOCK)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longseq needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(call install,)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(call install,[test])
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(call install,[bench])
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(call install,[docs])
	touch $@

clean:
	rm -rf .venv .venv-newest build site *.egg-info

# make demo, test, quick, thorough, torture, bench, docs or lint: each target first installs what it needs into .venv
PYTHON ?= python3
BIN := .venv/bin
# processes of the tests: each imports all libraries and makes the fixtures of its tests, so a third is no gain on two processors
WORKERS ?= 2
CHECKED := longseq.attention,longseq.encoders,longseq.tasks,longseq.training,longseq.reports,longseq.deploy,datamodules.images,datamodules.image_files,datamodules.mnist,datamodules.vowels
# install what the extra asks for: with uv, if it is there and reaches its registry, in a fifth of pip's time
install = $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python --editable '.$(1)' ||) $(BIN)/pip install --quiet --editable '.$(1)'

.PHONY: demo test quick thorough torture bench docs lint clean

demo: .venv/.installed
	$(BIN)/python train.py fit --config configs/image/digits.yaml
	$(BIN)/python train.py fit --config configs/audio/vowels.yaml
	@echo "curves, confusion matrices, pictures and sounds: $(BIN)/python train.py board"

test: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# runs all tests, those of `make test` and those that take long and show further cases of the same; it also checks the
# shapes and types of the calls, where tensors have shapes, which takes a fifth more time
thorough: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "" --jaxtyping-packages=$(CHECKED),beartype.beartype

# takes a minute: the tests of formulas, interfaces and contracts, without a training
quick: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix tests/, \
		attention/test_formulas.py attention/test_lengths.py attention/test_mixer.py attention/test_plug.py \
		attention/test_projections.py cli/test_names.py datamodules/test_order.py datamodules/test_splits.py \
		encoders/test_image.py encoders/test_patches.py encoders/test_resize.py encoders/test_spectrogram.py \
		training/test_classifier.py)

torture: .venv/.installed-test
	OMP_NUM_THREADS=1 TORTURE=200 $(BIN)/python -m pytest -n 2 tests/faults -m "" -k "random_moments or whenever_its_writer"

bench: .venv/.installed-bench
	$(BIN)/python benchmarks/peers.py

# site/index.html; a link that leads nowhere is an error
docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

.venv/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longseq needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(call install,)
	touch $@

.venv/.installed-test: .venv/.installed
	$(call install,[test])
	touch $@

.venv/.installed-bench: .venv/.installed
	$(call install,[bench])
	touch $@

.venv/.installed-docs: .venv/.installed
	$(call install,[docs])
	touch $@

clean:
	rm -rf .venv build site *.egg-info

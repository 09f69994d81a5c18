# `make test` and `make demo` are all that a fresh machine with Python >= 3.11 needs.

PYTHON ?= python3
VENV ?= .venv
# Any torch from 2.9 on: `make TORCH=torch VENV=.venv-newest test` takes the newest.
TORCH ?= torch==2.13.0

bin := $(VENV)/bin
ready := $(VENV)/.ready

# The demonstration: small universes, two ranks that each hold half of every one.
DEMO ?= build/demo
DEMO_COUNT ?= 128
DEMO_SIZE ?= 32
DEMO_RANKS ?= 2
DEMO_GRID ?= grid.depth=2

# The same for segmentation: phantoms as NIfTI files, masks of them.
UNET ?= build/demo-unet
UNET_COUNT ?= 24
UNET_SIZE ?= 48

# The data pipeline under random epochs and injected faults.
MINUTES ?= 30
RANKS ?= 4

.PHONY: setup demo demo-unet test soak lint docs bench clean

setup: $(ready)

$(ready): pyproject.toml Makefile
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet "$(TORCH)"
	$(bin)/python -m pip install --quiet -e ".[dev,universe,medical,zarr]"
	touch $@

demo: $(ready)
	$(bin)/hyperslab simulate $(DEMO)/universes --count $(DEMO_COUNT) --size $(DEMO_SIZE)
	$(bin)/hyperslab train recipes/demo.yaml --ranks $(DEMO_RANKS) $(DEMO_GRID) \
		data.path=$(DEMO)/universes output=$(DEMO)/run --resume
	$(bin)/hyperslab evaluate $(DEMO)/run
	$(bin)/hyperslab report $(DEMO)/run

demo-unet: $(ready)
	$(bin)/hyperslab convert lits --synthetic $(UNET_COUNT) $(UNET)/phantoms --size $(UNET_SIZE)
	$(bin)/hyperslab train recipes/demo-unet.yaml --ranks $(DEMO_RANKS) $(DEMO_GRID) \
		data.path=$(UNET)/phantoms output=$(UNET)/run --resume
	$(bin)/hyperslab evaluate $(UNET)/run
	$(bin)/hyperslab predict $(UNET)/run $(UNET)/phantoms/nifti --out $(UNET)/masks \
		--ranks $(DEMO_RANKS) $(DEMO_GRID)
	$(bin)/hyperslab report $(UNET)/run

test: $(ready)
	$(bin)/python -m pytest

soak: $(ready)
	OMP_NUM_THREADS=1 $(bin)/python -m tests.data.soak --minutes $(MINUTES) --ranks $(RANKS)

lint: $(ready)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/lint-imports

docs: $(ready)
	$(bin)/python docs/operators.py

bench: $(ready)
	$(bin)/python benchmarks/step.py
	$(bin)/python benchmarks/memory.py

clean:
	rm -rf build $(VENV)

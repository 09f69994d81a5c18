# `make test` and `make demo` are all that a fresh machine with Python >= 3.11 needs.

PYTHON ?= python3
VENV ?= .venv
# Any torch from 2.11 on: `make TORCH=torch VENV=.venv-newest test` takes the newest.
TORCH ?= torch==2.13.0

bin := $(VENV)/bin

# What Python has compiled is kept, also where the environment says otherwise, as images of
# containers do: each of the many processes of a run would compile all of it again.
export PYTHONDONTWRITEBYTECODE :=

# Python compiles the few modules that are imported when they are; pip would all of them, one by one.
install := $(bin)/python -m pip install --quiet --no-compile

# A target names the extras of pyproject.toml that it needs; each has a stamp in the environment.
torch := $(VENV)/.has-torch
has = $(addprefix $(VENV)/.has-,$(1))
tested := dev docs gpu report tensorboard medical zarr mlperf wandb mlflow lightning posterior
everything := lint $(tested)

# The demonstration: small universes, two ranks that each hold half of every one.
DEMO ?= build/demo
DEMO_COUNT ?= 1792
DEMO_SIZE ?= 32
# [Mpc/h]
DEMO_BOX ?= 128
# of the particle mesh
DEMO_STEPS ?= 5
DEMO_RANKS ?= 2
DEMO_GRID ?= grid.depth=2

# The recipe of Mathuriya et al. 2018 on own universes: docs/sc18.md.
SC18 ?= build/sc18
SC18_SIZE ?= 128
SC18_RESULT ?= benchmarks/results/sc18-$(SC18_SIZE).json

# The same for segmentation: phantoms as NIfTI files, masks of them.
UNET ?= build/demo-unet
UNET_COUNT ?= 24
UNET_SIZE ?= 48

# Figures 9 and 10 of Oyama et al. 2020 in small: sweeps over rates and seeds, and a ridge beside them.
SCIENCE ?= build/science-small
SCIENCE_COUNT ?= 256

# Random faults: `make soak KINDS="pipeline"` takes some kinds only.
MINUTES ?= 60
RANKS ?= 4
SEED ?= 0
KINDS ?=
COUNT ?= 10000
CASES ?= 1000000

# Collective reads need Open MPI and a parallel HDF5, on Debian the packages openmpi-bin,
# libopenmpi-dev and libhdf5-openmpi-dev, and an h5py built for them in an environment of its own.
MPI_VENV ?= .venv-mpi
MPI_RANKS := 4
HDF5_DIR ?= /usr/lib/$(shell gcc -print-multiarch)/hdf5/openmpi

# Where the real MRI of `make test-mri` is unpacked.
MRI ?= build/mricron

# Slurm, its node daemon and its commands, as Debian and Ubuntu name them.
SLURM_PACKAGES := munge slurmctld slurmd slurm-client iproute2

mpi := $(MPI_VENV)/bin
mpi_ready := $(MPI_VENV)/.ready

.PHONY: setup demo demo-unet science science-small sc18 test test-all test-long test-torch test-gpu setup-mpi test-mpi test-mri setup-slurm test-slurm soak fuzz lint docs bench bench-gpu clean

# All at once: pip resolves and builds once, and not for each extra.
setup: $(VENV)/.has-all

$(VENV)/.has-all: pyproject.toml | $(torch)
	$(install) -e ".[$(shell echo $(everything) | tr ' ' ,)]"
	touch $(addprefix $(VENV)/.has-,$(everything)) $@

$(torch): Makefile
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(install) --upgrade pip # Python's own is older, and half as fast at 200 packages
	$(install) "$(TORCH)"
	touch $@

$(VENV)/.has-%: pyproject.toml | $(torch)
	$(install) -e ".[$*]"
	touch $@

demo: $(call has,report)
	$(bin)/hyperslab simulate $(DEMO)/universes --count $(DEMO_COUNT) --size $(DEMO_SIZE) \
		--box-size $(DEMO_BOX) --steps $(DEMO_STEPS)
	$(bin)/hyperslab train recipes/demo.yaml --ranks $(DEMO_RANKS) $(DEMO_GRID) \
		data.path=$(DEMO)/universes output=$(DEMO)/run --resume
	$(bin)/hyperslab evaluate $(DEMO)/run
	$(bin)/hyperslab report $(DEMO)/run

demo-unet: $(call has,report medical)
	$(bin)/hyperslab convert lits --synthetic $(UNET_COUNT) $(UNET)/phantoms --size $(UNET_SIZE)
	$(bin)/hyperslab train recipes/demo-unet.yaml --ranks $(DEMO_RANKS) $(DEMO_GRID) \
		data.path=$(UNET)/phantoms output=$(UNET)/run --resume
	$(bin)/hyperslab evaluate $(UNET)/run
	$(bin)/hyperslab predict $(UNET)/run $(UNET)/phantoms/nifti --out $(UNET)/masks \
		--ranks $(DEMO_RANKS) $(DEMO_GRID)
	$(bin)/hyperslab report $(UNET)/run

# Stopped, it goes on where it was.
sc18: $(call has,report)
	$(bin)/python benchmarks/sc18.py $(SC18) --size $(SC18_SIZE) --json $(SC18_RESULT)

# The tables and figures of docs/science.md, from the records of its runs that lie in the repository.
science: $(call has,report dev)
	rm -rf build/science
	$(bin)/python -m zipfile -e benchmarks/results/science-figure9-runs.zip build/science
	$(bin)/hyperslab report build/science/figure9 build/science/figure9-equal-samples \
		--control ridge=build/science/ridge/whole --figures png \
		--json benchmarks/results/science-figure9.json
	$(bin)/python docs/science.py build/science/comparison-figures

science-small: $(call has,report dev)
	$(bin)/hyperslab simulate $(SCIENCE)/universes --count $(SCIENCE_COUNT) --size 32 --box-size 256
	mkdir -p $(SCIENCE)/ridge
	$(bin)/python benchmarks/ridge.py recipes/science-small.yaml data.path=$(SCIENCE)/universes \
		--out $(SCIENCE)/ridge --json $(SCIENCE)/ridge.json
	$(bin)/hyperslab sweep recipes/sweeps/science-small.yaml data.path=$(SCIENCE)/universes \
		--output $(SCIENCE)/sweep --ranks 2
	$(bin)/hyperslab report $(SCIENCE)/sweep --control ridge=$(SCIENCE)/ridge/whole \
		--json $(SCIENCE)/comparison.json

# Threads of sessions side by side wait asleep: by default each takes a core from the others for it.
test test-long: export OMP_WAIT_POLICY = passive

# The gate: what is marked `long` is left to test-all.
test: $(call has,$(tested))
	$(bin)/python -m pytest --durations=25 --junitxml=build/junit.xml

# All that takes hours: before a release, and after a change of what the gate leaves out.
test-all: test-long test-torch test-mpi test-mri test-slurm fuzz soak

test-long: $(call has,lint $(tested))
	$(bin)/python -m pytest -m "" --hypothesis-profile=default --durations=50 --junitxml=build/junit-long.xml

# The gate with the ends of the range of torch, each in an environment of its own.
test-torch:
	$(MAKE) VENV=.venv-oldest "TORCH=torch==2.11.*" test
	$(MAKE) VENV=.venv-newest "TORCH=torch" test

setup-mpi: $(mpi_ready)

# Everything but h5py and mpi4py is that of $(VENV). Without optimisation h5py is built in a minute.
$(mpi_ready): $(call has,$(tested))
	@command -v mpicc mpirun && test -d $(HDF5_DIR) || \
		{ echo "needs mpicc, mpirun and the parallel HDF5 in HDF5_DIR=$(HDF5_DIR)"; exit 1; }
	$(bin)/python -m venv --clear --without-pip $(MPI_VENV)
	$(bin)/python -c 'import site; print(site.getsitepackages()[0])' > $(MPI_VENV)/base.pth
	echo $(CURDIR)/src >> $(MPI_VENV)/base.pth
	mv $(MPI_VENV)/base.pth $$($(mpi)/python -c 'import site; print(site.getsitepackages()[0])')
	$(mpi)/python -m pip install --quiet --ignore-installed --no-deps "mpi4py>=4,<5" cython pkgconfig
	CC=mpicc CFLAGS="-O0 -w" HDF5_MPI=ON HDF5_DIR=$(HDF5_DIR) $(mpi)/python -m pip install --quiet \
		--no-cache-dir --no-build-isolation --no-deps --ignore-installed --no-binary=h5py "h5py>=3.10,<4"
	touch $@

test-mpi: export OMP_NUM_THREADS = 1
test-mpi: export OMPI_ALLOW_RUN_AS_ROOT = 1
test-mpi: export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
test-mpi: $(mpi_ready)
	mpirun -n $(MPI_RANKS) --oversubscribe $(mpi)/python -m mpi4py -m tests.mpi.collective
	$(mpi)/python -m tests.mpi.command

# Installed where this is root on Debian or the like; elsewhere that is up to you.
setup-slurm:
	@(for tool in munged slurmctld slurmd srun ip; do command -v $$tool || exit 1; done) > /dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get > /dev/null && \
			export DEBIAN_FRONTEND=noninteractive && timeout 120 apt-get update > /dev/null && \
			timeout 300 apt-get install -y --no-install-recommends $(SLURM_PACKAGES) > /dev/null; } || \
		{ echo "needs root and the packages $(SLURM_PACKAGES)"; exit 1; }
	@test "$$(id -u)" = 0 && unshare --net true || { echo "needs root and network namespaces"; exit 1; }

# A real Slurm with two nodes, in a temporary folder; it runs the files in slurm/.
test-slurm: export HYPERSLAB_TEST_SLURM = 1
test-slurm: $(call has,$(tested)) setup-slurm
	$(bin)/python -m pytest -n 0 --durations=5 tests/slurm

# With a CUDA device: what is marked so, then the samples of all operators on ranks that share it.
test-gpu: $(call has,$(tested))
	$(bin)/python -m pytest -n 0 -m gpu --durations=10
	HYPERSLAB_TEST_DEVICE=cuda $(bin)/python -m pytest -n 0 tests/ops --durations=10

# With a real MRI and its labels: Debian's package mricron-data, unpacked here, not installed.
test-mri: $(call has,$(tested))
	test -f $(MRI)/usr/share/mricron/templates/ch2.nii.gz || { mkdir -p $(MRI) && cd $(MRI) && \
		apt-get download mricron-data && dpkg -x mricron-data_*.deb . ; }
	HYPERSLAB_MRI=$(abspath $(MRI))/usr/share/mricron/templates OMP_NUM_THREADS=1 \
		$(bin)/python -m pytest -n 0 tests/mri

soak: $(call has,$(tested))
	OMP_NUM_THREADS=1 $(bin)/python -m tests.soak --minutes $(MINUTES) --ranks $(RANKS) \
		--seed $(SEED) --cases $(CASES) $(addprefix --kind ,$(KINDS))

# Random changes of the files that are read: `make fuzz COUNT=10000 SEED=1`.
fuzz: $(call has,$(tested))
	OMP_NUM_THREADS=1 $(bin)/python -m tests.soak.fuzz --count $(COUNT) --seed $(SEED)

lint: $(call has,lint)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/lint-imports

# The site, in build/site: index.html opens without a server and without a network.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(call has,docs)
	$(bin)/python docs/operators.py
	$(bin)/python docs/llms.py
	$(bin)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

# Run the notebooks and keep what they print and draw.
.PHONY: notebooks
notebooks: $(call has,docs report medical)
	$(bin)/python docs/notebooks/run.py

# The first hour on a machine with a GPU; it goes on where the last run ended.
bench-gpu: $(call has,gpu)
	$(bin)/python benchmarks/first_hour.py

bench: $(call has,dev report)
	$(bin)/python benchmarks/step.py
	$(bin)/python benchmarks/limit.py
	$(bin)/python benchmarks/memory.py
	$(bin)/python benchmarks/io.py --side 256

clean:
	rm -rf build $(VENV) $(MPI_VENV) .venv-oldest .venv-newest

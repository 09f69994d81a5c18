# hyperslab with PyTorch, for GPUs and CPUs, from this tree:
#
#   docker build -t hyperslab .
#   docker run --rm --gpus all --shm-size=8g -v "$PWD:/data" hyperslab train recipe.yaml --ranks 4 grid.depth=4
#
# torch's wheels bring CUDA's libraries; the driver is the host's (NVIDIA's container toolkit). Without
# GPUs the image is much smaller with
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t hyperslab:cpu .

FROM python:3.11-slim-bookworm

# Fused kernels are compiled by the installation, Triton's where they first run: a C compiler is needed for good.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple "$TORCH"

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE /src/
COPY src /src/src
COPY recipes /src/recipes
RUN pip install --no-cache-dir "/src[gpu,medical,zarr,wandb,mlflow]" && rm -r /src

# Any user may run it, also one without a home: what is compiled and cached goes to a folder of its own.
ENV XDG_CACHE_HOME=/var/cache/hyperslab \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/hyperslab/inductor \
    TRITON_CACHE_DIR=/var/cache/hyperslab/triton \
    MPLCONFIGDIR=/var/cache/hyperslab/matplotlib
RUN mkdir -p -m 1777 /var/cache/hyperslab /data
WORKDIR /data

ENTRYPOINT ["hyperslab"]
CMD ["--help"]

# TorchTitan with the CUDA libraries that PyTorch's wheels bring: docker build -t torchtitan .
#
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/workspace" torchtitan train my.toml
#
# Build arguments:
#   EXTRAS       of pyproject.toml, separated by commas: s3,wandb
#   TORCH_INDEX  where torch comes from: https://download.pytorch.org/whl/cpu is small, and has no CUDA
#   RUN_AS       root for SkyPilot, which sets up each container itself
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRAS=
ARG TORCH_INDEX=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/torchtitan
ENV PATH=/opt/torchtitan/bin:$PATH
WORKDIR /build
COPY constraints.txt ./
COPY requirements/run.txt requirements/
# The lock has no torch, whose files differ between indexes; its version is that of the constraints.
RUN pip install --require-hashes --no-deps --requirement requirements/run.txt \
    && pip install --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple \
        "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install --no-deps --no-build-isolation . \
    && if [ -n "$EXTRAS" ]; then pip install --constraint constraints.txt "titan-pretrain[$EXTRAS]"; fi

FROM python:${PYTHON}-slim-bookworm
ARG RUN_AS=torchtitan
LABEL org.opencontainers.image.title="torchtitan" \
      org.opencontainers.image.description="Pretrain language models from one TOML file" \
      org.opencontainers.image.licenses="BSD-3-Clause"
# torch.compile and Triton call a compiler; NCCL opens libibverbs, where there is InfiniBand. Debian
# keeps only the newest versions, so they can't be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 torchtitan \
    && install --directory --owner torchtitan /workspace \
    && ln -s /opt/torchtitan/bin/torchtitan /usr/local/bin/ # login shells set PATH anew
COPY --from=build /opt/torchtitan /opt/torchtitan
# The last two are for NVIDIA's container runtime, which looks for them in the image.
ENV PATH=/opt/torchtitan/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER $RUN_AS
WORKDIR /workspace
ENTRYPOINT ["torchtitan"]
CMD ["--help"]

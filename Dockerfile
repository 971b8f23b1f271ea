# rl4llm in a container, without inference servers, which publish images themselves:
#
#   docker build -t rl4llm .                            # torch for CPUs
#   docker build -t rl4llm --build-arg TORCH=cu130 .    # torch for GPUs with CUDA 13.0
#   docker run --rm -it -v "$PWD:/work" rl4llm recipe quickstart
#
# Programs that a model wrote run in bubblewrap, which Docker's default profile forbids: add --security-opt seccomp=unconfined
# --security-opt apparmor=unconfined, or leave such programs to sandboxes on another machine.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

# The packages first: they change less often than the code. PyTorch's own index has a build for each CUDA.
COPY scripts/lock/core.txt /tmp/core.txt
RUN pip install --no-deps --require-hashes --requirement /tmp/core.txt \
    && pip install torch==2.13.0 --index-url "https://download.pytorch.org/whl/${TORCH}"
COPY . /opt/rl4llm
RUN pip install --no-deps /opt/rl4llm /opt/rl4llm/extras/compat /opt/rl4llm/extras/tinker && pip check

RUN useradd --create-home --uid 1000 rl4llm && install --directory --owner=rl4llm /work
USER 1000
WORKDIR /work
ENTRYPOINT ["rl4llm"]
CMD ["--help"]

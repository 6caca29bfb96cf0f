# The worker: --target cpu or --target cuda. Build at the root of the project:
# docker build --file docker/worker.Dockerfile --target cpu --tag moebius/worker:0.1.0-cpu .
ARG BUILDER=python:3.11.14-bookworm
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${BUILDER} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python -m venv --without-pip /opt/moebius
COPY docker/prune.sh docker/requirements/worker.txt docker/

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/moebius/bin/python install --no-compile --extra-index-url ${TORCH_INDEX} \
    --requirement docker/worker.txt \
    && docker/prune.sh /opt/moebius/lib/python3.11/site-packages
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY kernels kernels
RUN pip --python /opt/moebius/bin/python install --no-deps .

FROM build AS build-cuda
# Here torch brings CUDA's libraries and Triton, in the versions that it names.
RUN pip --python /opt/moebius/bin/python install --no-compile --requirement docker/worker.txt \
    && docker/prune.sh /opt/moebius/lib/python3.11/site-packages
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY kernels kernels
RUN pip --python /opt/moebius/bin/python install --no-deps .

FROM ${PYTHON} AS base
RUN groupadd --gid 10001 moebius && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home moebius \
    && install -d -o 10001 -g 10001 /var/cache/moebius
ENV PATH=/opt/moebius/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp MOEBIUS_CACHE_DIR=/var/cache/moebius/kernels \
    HF_HOME=/var/cache/moebius/huggingface
EXPOSE 7601 9401
ENTRYPOINT ["moebius-worker"]

FROM base AS cpu
COPY --from=build-cpu /opt/moebius /opt/moebius
USER 10001:10001

FROM base AS cuda
# Triton compiles the launcher of each kernel with a C compiler, at run time.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/moebius /opt/moebius
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001

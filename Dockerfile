# One image for every role; the command says which: router, prefill, decode, or serve for all in one.
#
#   docker build -t pdserve .                                     CPU
#   docker build -t pdserve --build-arg VARIANT=cuda .            NVIDIA GPUs
#
# TORCH_PIP_ARGS are pip arguments for torch alone. For a small CPU image, name the index of PyTorch's CPU wheels, as
# its installation page gives it: --build-arg TORCH_PIP_ARGS="--index-url ...". Without it pip takes the default wheel,
# which works on a CPU too but carries the CUDA libraries; that is the one for VARIANT=cuda.

ARG PYTHON_VERSION=3.11
ARG VARIANT=cpu

FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/pdserve/bin:$PATH

# Slowest and most stable first: torch, the other dependencies, then the code.
FROM base AS build
ARG TORCH_VERSION=2.13.0
ARG TORCH_PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# g++ compiles the CPU kernels; it stays in this stage.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/pdserve
RUN pip install ${TORCH_PIP_ARGS} torch==${TORCH_VERSION}
WORKDIR /source
COPY deploy/list_dependencies.py deploy/
COPY pyproject.toml ./
RUN python deploy/list_dependencies.py pyproject.toml > requirements.txt && pip install -r requirements.txt
COPY README.md LICENSE setup.py ./
COPY proto proto
COPY kernels kernels
COPY engine engine
COPY kv_transfer kv_transfer
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY router router
COPY bench bench
COPY pdserve pdserve
RUN pip install --no-deps . && python -m compileall -q /opt/pdserve/lib

FROM base AS runtime-cpu
ENV PDSERVE_DEVICE=cpu

FROM base AS runtime-cuda
ENV PDSERVE_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles its launchers with it, once for each kernel.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

FROM runtime-${VARIANT} AS runtime
# libgomp: torch's threads; nothing else is missing from the slim image.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin pdserve \
    && install --directory --owner=pdserve --group=pdserve /models
COPY --from=build /opt/pdserve /opt/pdserve
ENV PDSERVE_CACHE=/models/pdserve \
    HF_HOME=/models/huggingface
USER 10001:10001
WORKDIR /home/pdserve
VOLUME /models
# HTTP and gRPC of the router; gRPC of a node.
EXPOSE 8000 8001 7001
STOPSIGNAL SIGTERM
# Asks whatever PDSERVE_HEALTH_URL (a router) or PDSERVE_HEALTH_GRPC (a node) names.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["pdserve", "health"]
ENTRYPOINT ["pdserve"]
CMD ["--help"]

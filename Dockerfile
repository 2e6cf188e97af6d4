# longseq with the releases of constraints/3.12.txt, for a CPU or for NVIDIA's GPUs:
#   docker build --build-arg DEVICE=cpu --tag longseq:cpu .
#   docker build --build-arg DEVICE=cuda --tag longseq:cuda .
#   docker run --rm --volume "$PWD:/work" longseq:cpu fit --config image/folder --data.root pictures
#   docker run --rm --gpus all --shm-size 8g --volume "$PWD:/work" longseq:cuda fit --config image/folder --config trainer/gpu --data.root pictures
FROM python:3.12-slim-bookworm
ARG DEVICE=cpu
# ffmpeg reads what libsndfile cannot; Triton compiles with gcc on a GPU
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ffmpeg $([ "$DEVICE" = cpu ] || echo gcc libc6-dev) \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY constraints constraints
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY longseq longseq
COPY datamodules datamodules
# PyPI's torch brings CUDA; the one of the other index is the same release without it, and counts as newer
RUN case "$DEVICE" in \
        cpu) index="--extra-index-url https://download.pytorch.org/whl/cpu" ;; \
        cuda) index="" ;; \
        *) echo "DEVICE is cpu or cuda, got $DEVICE" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir $index --constraint constraints/3.12.txt . \
    && rm -rf /source
WORKDIR /work
ENTRYPOINT ["longseq"]
CMD ["--help"]

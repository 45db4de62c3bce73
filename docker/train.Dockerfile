# Training on one machine or as a node of a Ray cluster: torch, Ray, Atari.
#   docker build -f docker/train.Dockerfile -t bray-train .
#   docker run --shm-size 4g -v ./runs:/home/bray/runs bray-train bray train --run PPO --env CartPole-v1
#   docker run --shm-size 4g -p 8000:8000 -v ./mygame:/home/bray/mygame bray-train bray launch --config mygame/rl.yaml
# A cluster: `ray start --head --block` in one container, `ray start --address HEAD:6379 --block` in the others (--network host).
FROM debian:bookworm-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates make python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home bray
WORKDIR /home/bray/src
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY tools ./tools
COPY bray ./bray
COPY template ./template
RUN make setup EXTRAS=train,serve,remote,atari PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
ENV PATH=/home/bray/src/.venv/bin:$PATH
USER bray
WORKDIR /home/bray
EXPOSE 8000 8001 6379
CMD ["bray", "doctor"]

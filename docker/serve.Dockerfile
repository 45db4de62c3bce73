# A game service from an exported run: no torch, no Ray.
#   docker build -f docker/serve.Dockerfile -t bray-serve .
#   docker run -p 8000:8000 -v ./runs:/runs:ro bray-serve /runs/CartPole-v1/ppo-v0
FROM debian:bookworm-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates make python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home bray
WORKDIR /home/bray/src
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY bray ./bray
COPY template ./template
RUN make setup EXTRAS=serve PIP_NO_CACHE_DIR=1
ENV PATH=/home/bray/src/.venv/bin:$PATH
USER bray
WORKDIR /home/bray
EXPOSE 8000 8001
ENTRYPOINT ["bray", "serve", "--host", "0.0.0.0", "--port", "8000"]

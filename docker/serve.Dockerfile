# A game service from an exported run: no torch, no Ray, no numba.
#   docker build -f docker/serve.Dockerfile -t bray-serve .
#   docker run -p 8000:8000 -p 127.0.0.1:8001:8001 -v ./runs:/runs:ro bray-serve /runs/CartPole-v1/ppo-v0
#   curl localhost:8001/metrics
# With everything around it: deploy/compose.yaml, docs/operating.md.
FROM debian:bookworm-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates make python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 bray
WORKDIR /home/bray/src
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY tools ./tools
COPY bray ./bray
COPY template ./template
RUN make setup EXTRAS=serve PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
ENV PATH=/home/bray/src/.venv/bin:$PATH
USER 10001
WORKDIR /home/bray
EXPOSE 8000 8001
# Inside of a container 127.0.0.1 is nobody else. From outside the admin port gives probes and metrics; the rest needs the admin token.
ENTRYPOINT ["bray", "serve", "--host", "0.0.0.0", "--port", "8000", "admin_host=0.0.0.0"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8001/healthz', timeout=4)"]

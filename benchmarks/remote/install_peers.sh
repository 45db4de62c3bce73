#!/usr/bin/env bash
# The virtual environment of the original's architecture: benchmarks/remote/install_peers.sh   (.venv-remote-peers in the root)
# Where pip would fetch the CUDA build of torch, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$root/.venv-remote-peers"
"$root/.venv-remote-peers/bin/pip" install --quiet -c "$root/constraints.txt" \
    torch numpy uvloop httptools uvicorn==0.54.0 fastapi==0.162.4 'ray==2.60.0'

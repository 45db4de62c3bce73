#!/usr/bin/env bash
# The virtual environment of the serving peers: benchmarks/serving/install_peers.sh   (.venv-serving-peers in the root)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$root/.venv-serving-peers"
"$root/.venv-serving-peers/bin/pip" install --quiet uvicorn==0.54.0 fastapi==0.162.4 uvloop==0.23.0 httptools==0.9.0 'ray[serve]==2.60.0'

#!/usr/bin/env bash
# Creates the virtual environment of Sample Factory: benchmarks/install_sample_factory.sh [DIR]   (default: .venv-sample-factory in the root)
# faster-fifo is built from source where it has no wheel: g++. torch's CPU build: see install_peers.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-$here/../.venv-sample-factory}

"${PYTHON:-python3}" -m venv "$dir"
dir=$(cd "$dir" && pwd)
echo '*' > "$dir/.gitignore"
pip() { "$dir/bin/python" -m pip "$@"; }

pip install --quiet --requirement "$here/peers_sample_factory.txt"
# The same cv2 without windows, over the one that sample-factory names: that one wants libGL.
pip install --quiet --no-deps --force-reinstall opencv-python-headless==4.11.0.86

(cd "$dir" && bin/python -c "
import ale_py, cv2, gymnasium, sample_factory.train, torch
print('sample-factory ready: torch', torch.__version__, 'gymnasium', gymnasium.__version__)" 2> /dev/null)

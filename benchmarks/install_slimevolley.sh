#!/usr/bin/env bash
# Creates the virtual environment of benchmarks/slimevolley.py: benchmarks/install_slimevolley.sh [DIR]   (default:
# .venv-slimevolley in the root). gym is no longer maintained and says so when it is imported; the package needs it and
# OpenCV to be there, and plays without either. Training needs neither: the package is for the baseline and for `check`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=${1:-$root/.venv-slimevolley}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
echo '*' > "$dir/.gitignore"

cd "$root"
tools/install "$dir" train
pip() { "$dir/bin/python" -m pip install --quiet --no-deps "$@"; }
pip opencv-python-headless gym-notices cloudpickle setuptools wheel
pip --no-build-isolation gym==0.26.2 slimevolleygym==0.1.0
"$dir/bin/python" -m benchmarks.slimevolley check 2> /dev/null

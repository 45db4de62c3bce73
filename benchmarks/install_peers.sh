#!/usr/bin/env bash
# Creates the virtual environment of the peers: benchmarks/install_peers.sh [DIR]   (default: .venv-peers in the root)
# torch is pinned in peers.txt; where pip would fetch its CUDA build, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-$here/../.venv-peers}

"${PYTHON:-python3}" -m venv "$dir"
dir=$(cd "$dir" && pwd)
echo '*' > "$dir/.gitignore"
pip() { "$dir/bin/python" -m pip "$@"; }

pip install --quiet --requirement "$here/peers.txt"
pip install --quiet --no-deps --no-build-isolation gym==0.26.2
PATH=$dir/bin:$PATH pip install --quiet --no-build-isolation box2d-py==2.3.8

# PufferLib: without its own environments (they need raylib, which it has for x86 only) and without CUDA (nvcc off the
# PATH). Its setup.py then forgets to define one name, which a sitecustomize defines for the time of the build.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo 'import builtins; builtins.c_extension_paths = []' > "$scratch/sitecustomize.py"
path=$dir/bin
IFS=: read -ra folders <<< "$PATH"
for folder in "${folders[@]}"; do
    [ -x "$folder/nvcc" ] || path=$path:$folder
done
PATH=$path NO_OCEAN=1 PYTHONPATH=$scratch pip install --quiet --no-deps --no-build-isolation pufferlib==3.0.0

(cd "$scratch" && "$dir/bin/python" -c "
import Box2D, ale_py, cpprb, envpool, gymnasium, minatar, mpe2, mujoco, pygame, ray.rllib, pufferlib.pufferl, sb3_contrib, stable_baselines3, tianshou, torch
print('peers ready: torch', torch.__version__, 'gymnasium', gymnasium.__version__)" 2> /dev/null)

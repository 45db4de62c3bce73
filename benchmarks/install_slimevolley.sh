#!/usr/bin/env bash
# Creates the virtual environment of benchmarks/slimevolley.py: benchmarks/install_slimevolley.sh [DIR]   (default:
# .venv-slimevolley in the root). gym is no longer maintained and says so when it is imported; the game needs it and
# OpenCV to be there, and plays without either.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-$here/../.venv-slimevolley}

"${PYTHON:-python3}" -m venv "$dir"
dir=$(cd "$dir" && pwd)
echo '*' > "$dir/.gitignore"
"$dir/bin/python" -m pip install --quiet --editable "$here/..[train]" opencv-python-headless
"$dir/bin/python" -m pip install --quiet --no-deps gym==0.26.2 gym-notices cloudpickle slimevolleygym==0.1.0
"$dir/bin/python" -c "import slimevolleygym, bray; print('ready: Bray', bray.__version__)" 2> /dev/null

#!/usr/bin/env bash
# PPO Pong on a CPU with bfloat16 arithmetic, ours in both precisions and the peers in turn: benchmarks/pong_amx.sh [PASSES] [SECONDS]
# Everything runs on the same two cores (CPUS=a,b; by default the last two that lscpu does not call siblings), without a GPU.
# PYTHON and PEER_PYTHON name the interpreters. One JSON line per measurement, with the share of time that a hypervisor took
# from the two cores meanwhile (`stolen`); then the medians and their ratios to the fastest peer. LOG=FILE adds to an earlier run.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
passes=${1:-5} seconds=${2:-25}
python=$(command -v "${PYTHON:-python}") peer_python=$(command -v "${PEER_PYTHON:-.venv-peers/bin/python}")
cpus=${CPUS:-$(lscpu -p=CPU,CORE | awk -F, '!/^#/ && !seen[$2]++ {print $1}' | tail -2 | paste -sd,)}
log=${LOG:-$(mktemp)}

export OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 CUDA_VISIBLE_DEVICES=
path=
IFS=: read -ra folders <<< "$PATH"
for folder in "${folders[@]}"; do # with nvcc on the PATH PufferLib wants to compute its advantages on a GPU
    [ -x "$folder/nvcc" ] || path=$path:$folder
done

ticks() { awk -v cpus=",$cpus," '/^cpu[0-9]/ && index(cpus, "," substr($1, 4) ",") {for (i = 2; i <= 9; i++) all += $i; stolen += $9}
    END {print all, stolen}' /proc/stat; }

measure() { # PASS COMMAND...
    local pass=$1 all stolen all2 stolen2 line
    shift
    read -r all stolen < <(ticks)
    line=$(taskset -c "$cpus" "$@" --seconds "$seconds" 2> >(tail -3 >&2) | grep '^{' | tail -1) || true
    read -r all2 stolen2 < <(ticks)
    if [ -z "$line" ]; then
        echo "{\"pass\": $pass, \"failed\": \"$*\"}"
    else
        echo "{\"pass\": $pass, \"stolen\": $(awk "BEGIN {printf \"%.3f\", ($stolen2 - $stolen) / ($all2 - $all)}"), ${line#\{}"
    fi | tee -a "$log"
}

echo "{\"cpu\": \"$(lscpu | sed -n 's/^Model name: *//p')\", \"cpus\": \"$cpus\", \"amx\": $(grep -qw amx_bf16 /proc/cpuinfo && echo true || echo false)}"
for pass in $(seq "$passes"); do
    measure "$pass" "$python" -m benchmarks.ours ppo-pong
    measure "$pass" "$python" -m benchmarks.ours ppo-pong-bf16
    measure "$pass" "$peer_python" benchmarks/peers/cleanrl_style.py ppo-pong --env ale
    measure "$pass" "$peer_python" benchmarks/peers/sb3.py ppo-pong
    measure "$pass" env PATH="${path#:}" "$peer_python" benchmarks/peers/pufferlib_ppo.py ppo-pong
done

"$python" - "$log" << 'END'
import collections, json, statistics, sys

rates = collections.defaultdict(list)
for line in map(json.loads, open(sys.argv[1])):
    if "peer" in line:
        rates[line["peer"] + (" bfloat16" if line["case"].endswith("bf16") else "")].append(line["env_steps_per_second"])
medians = {k: statistics.median(v) for k, v in rates.items()}
peers = {k: v for k, v in medians.items() if not k.startswith("bray")}
summary = {"case": "ppo-pong", "medians": medians, "passes": {k: len(v) for k, v in rates.items()}}
if peers:
    best = max(peers, key=peers.__getitem__)
    summary |= {"fastest_peer": best} | {f"ratio {k}": round(v / peers[best], 2) for k, v in medians.items() if k not in peers}
print(json.dumps(summary))
END

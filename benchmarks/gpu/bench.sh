#!/bin/sh
# Measures podrace on one GPU within 13 minutes, without a network, and adds the results to benchmarks/results/gpu.json:
#
#     sh benchmarks/gpu/bench.sh [PYTHON]
#
# PYTHON has JAX with CUDA. Packages that it lacks come from .whl, which prepare.sh fills on a machine with a network.
set -eu
cd "$(dirname "$0")/../.."
python=${1:-python3} out=${OUT:-build/gpu} site=build/gpu-site
if [ -d .whl ] && ! [ -d "$site/tyro" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
fi
if [ -d "$site" ]; then
  PYTHONPATH=$PWD/$site${PYTHONPATH:+:$PYTHONPATH}
  export PYTHONPATH
fi
measure() { "$python" -u benchmarks/gpu/measure.py --out "$out" "$@"; }
measure --budget 535 --ahead 150
measure pong wide transformer replay muzero wider ordered 'muzero loops' 'sebulba 256' eval lpg acting --ahead 0 --budget 205
measure --merge "$out"

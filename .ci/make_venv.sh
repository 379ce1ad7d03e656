#!/usr/bin/env bash
# make_venv.sh PYTHON VENV: checks what the build needs, then makes VENV with pip, setuptools and a torch in range.
# All that is missing is told in one line, before anything is downloaded. Reads TORCH_SPEC and TORCH_INDEX_URL.
set -euo pipefail

python=$1
venv=$2
torch_range='torch>=2.10'
needed_mb=2500

preflight() {
  local missing=() free_mb
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    missing+=("python >= 3.10 ($python is missing or older: set PYTHON=)")
  elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    missing+=("$python's venv module (apt-get install python3-venv)")
  fi
  command -v "${CXX:-g++}" >/dev/null || missing+=("${CXX:-g++} (apt-get install g++)")
  command -v make >/dev/null || missing+=("make (apt-get install make)")
  free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
  [ "$free_mb" -ge "$needed_mb" ] || missing+=("$needed_mb MB of free disk (there are $free_mb MB)")
  if [ "${#missing[@]}" -gt 0 ]; then
    local IFS=';'
    echo "pagedllm cannot be set up here; missing:${missing[*]/#/ }" >&2
    exit 1
  fi
}

# Prints where a torch in range lies that `python` imports; nothing if there is none.
torch_of() {
  "$1" - "$torch_range" <<'PYTHON' 2>/dev/null || true
import importlib.metadata, importlib.util, os, sys
from pip._vendor.packaging.requirements import Requirement
if importlib.metadata.version("torch").split("+")[0] in Requirement(sys.argv[1]).specifier:
    print(os.path.dirname(os.path.dirname(importlib.util.find_spec("torch").origin)))
PYTHON
}

preflight
if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv"
  outer=$(torch_of "$python")
  if [ -n "$outer" ]; then
    echo "using the torch in $outer"
    echo "$outer" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer-torch.pth"
  fi
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
if [ -z "$(torch_of "$venv/bin/python")" ]; then
  echo "set-up downloads about 360 MB and writes about 1,700 MB, once (about 3,000 and 6,500 MB where pip finds a torch" \
    "with CUDA first: TORCH_INDEX_URL=URL names an index of CPU builds)"
  "${pip[@]}" "$TORCH_SPEC" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
else
  echo "set-up downloads about 170 MB and writes about 700 MB, once"
fi
"${pip[@]}" 'setuptools>=77' wheel

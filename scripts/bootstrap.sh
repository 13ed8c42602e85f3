#!/bin/bash
# Build or refresh .venv: Python >= 3.12, the pinned CPU requirements and this package. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv stamp=.venv/.requirements
want=$(cat requirements/cpu.txt setup.py pyproject.toml | sha256sum | cut -d' ' -f1)
[ "$(cat $stamp 2>/dev/null)" = "$want" ] && exit 0

works() { "$1" -c 'import sys, venv, ensurepip; raise SystemExit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
find_python() {
  # megatron-core needs >= 3.12, the pinned SGLang has wheels up to 3.13; 3.12 is the version that CI proves.
  for p in ${PYTHON:-} python3.12 python3.13 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
    works "$p" && { command -v "$p"; return; }
  done
  return 1
}
python=$(find_python) || {
  echo "Python 3.12 or 3.13 with venv is needed (megatron-core 0.19.2 asks for >= 3.12, SGLang 0.5.23 ships wheels up to 3.13)." >&2
  echo "Install it, e.g.  apt-get install python3.12 python3.12-venv  or  pyenv install 3.12 , or point PYTHON at one." >&2
  exit 1
}
command -v cc >/dev/null || command -v gcc >/dev/null || { echo "A C compiler is needed: e.g.  apt-get install gcc" >&2; exit 1; }
echo "building $venv with $python (about 7 GB; a few minutes)"
[ -x $venv/bin/python ] && works $venv/bin/python || "$python" -m venv --clear $venv
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/cpu.txt
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
echo "$want" > $stamp

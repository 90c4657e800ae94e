#!/usr/bin/env bash
# Makes the environment of `make parity`: requirements/parity.sh BASE FOLDER
# A .pth file adds the packages of BASE. parity.txt's packages stay separate: asyncrl must work without them.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$1 venv=$2
"$base/bin/python" -m venv --without-pip "$venv"
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
"$base/bin/python" -c "$packages" >"$("$venv/bin/python" -c "$packages")/asyncrl.pth"
"$base/bin/python" -m pip --python "$venv/bin/python" --disable-pip-version-check --quiet \
  install --no-deps --requirement requirements/parity.txt

#!/usr/bin/env bash
# Makes a virtual environment with the pinned packages and this project: requirements/install.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
  echo "asyncrl's pinned environment needs Python 3.11; $python is $("$python" --version 2>&1). Set PYTHON to one." >&2
  exit 1
fi
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

torch=$(grep '^torch==' requirements/cpu.lock)
# Whatever index or folder pip is set up with may have the CPU build; PyTorch's own index certainly has.
pip install --no-deps "$torch" 2>/dev/null ||
  pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
pip install --no-deps --requirement requirements/cpu.lock
pip install --no-deps --no-build-isolation requirements/absent/* --editable .
pip check

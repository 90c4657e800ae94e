#!/usr/bin/env bash
# Makes a virtual environment with the pinned packages and this project: requirements/install.sh [FOLDER [cpu|gpu]]
# Nothing is resolved: the lock is complete (decision 0007).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv} device=${2:-cpu}
supported=(3.11 3.12 3.13)
torch_index=https://download.pytorch.org/whl/cpu

fail() {
  printf 'error: %s\n --> %s\nhint: %s\n' "$@" >&2
  exit 2
}

# True for a Python with a supported version. A name on the path may be only a shim that starts no Python, as pyenv's.
supports() {
  "$1" -c 'import sys; sys.exit(".".join(map(str, sys.version_info[:2])) not in sys.argv[1:])' "${supported[@]}" 2>/dev/null
}

# Prints the command that installs a supported Python on this machine.
command_for_python() {
  if command -v apt-get >/dev/null; then
    for version in 3.12 3.13 3.11; do
      if apt-cache show "python$version-venv" >/dev/null 2>&1; then
        echo "apt-get install python$version-venv"
        return
      fi
    done
  elif command -v dnf >/dev/null; then
    echo "dnf install python3.12"
    return
  fi
  echo "curl -LsSf https://astral.sh/uv/install.sh | sh && ~/.local/bin/uv python install 3.12"
}

# Installs a package on Debian or Ubuntu, as root or with passwordless sudo.
from_debian() {
  local as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  command -v apt-get >/dev/null && "${as_root[@]}" apt-get -qq update </dev/null >/dev/null 2>&1 &&
    "${as_root[@]}" apt-get -qq install -y --no-install-recommends "$1" </dev/null >/dev/null 2>&1 &&
    echo "installed: $1"
}

[ -f "requirements/$device.lock" ] || fail "there is no lock for the device $device" "DEVICE" "set DEVICE to cpu or gpu"
python="" without_venv=""
for candidate in ${PYTHON:-"${supported[@]/#/python}" python3}; do
  supports "$candidate" || continue
  if "$candidate" -c 'import ensurepip' 2>/dev/null; then
    python=$candidate
    break
  fi
  without_venv=$candidate
done
# Debian ships ensurepip in a separate package. PYTHON is the user's choice, so it is never replaced.
if [ -z "$python${PYTHON:-}" ] && [ -n "$without_venv" ] && from_debian python3-venv &&
  "$without_venv" -c 'import ensurepip' 2>/dev/null; then
  python=$without_venv
fi
if [ -z "$python" ] && [ -n "$without_venv" ]; then
  fail "this Python has no module ensurepip, which makes virtual environments" "$without_venv" "$(command_for_python)"
elif [ -z "$python" ]; then
  fail "asyncrl needs Python 3.11, 3.12 or 3.13" "${PYTHON:-PATH}" \
    "$(command_for_python), or set PYTHON to the path of one"
fi
if [ "$device" = cpu ]; then
  has_numa() { "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; }
  has_numa || from_debian libnuma1 || true
  has_numa || fail "vLLM's CPU build needs the library libnuma.so.1" "$(uname -n)" \
    "install it (Debian, Ubuntu: apt-get install libnuma1; Fedora: dnf install numactl-libs) and run make again"
fi
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# uv downloads and unpacks packages in parallel; pip takes one after the other, and compiles all their modules.
pip install --no-deps "$(grep '^uv==' "requirements/$device.lock")" || true
# uv does not read pip's settings, so pass on its indexes and certificates.
while IFS='=' read -r key value; do
  value=${value:1:-1}
  case "${key##*.}" in
    index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}" ;;
    no-index) export UV_OFFLINE=1 ;;
    find-links) export UV_FIND_LINKS="${UV_FIND_LINKS:-$value}" ;;
    cert) export SSL_CERT_FILE="${SSL_CERT_FILE:-$value}" ;;
  esac
done < <("$venv/bin/python" -m pip config list)
# If uv cannot install a package, pip installs it or names the reason.
packages() {
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps "$@" 2>/dev/null ||
    pip install --no-deps "$@"
}

stand_ins=()
if [ "$device" = cpu ]; then
  torch=$(grep '^torch==' requirements/cpu.lock)
  # pip's configured indexes may have the CPU build; PyTorch's own index certainly has it.
  packages "$torch" 2>/dev/null || packages --extra-index-url "$torch_index" "$torch" ||
    fail "pip finds no $torch for $("$venv/bin/python" --version)" "pip's indexes and $torch_index" \
      "open a way to that index, or set PIP_FIND_LINKS to a folder with the wheel"
  stand_ins=(requirements/absent/torchaudio requirements/absent/torchcodec)
fi
# The only package in the locks that must be compiled.
if ! packages "$(grep '^pycosat==' "requirements/$device.lock")" >/dev/null 2>&1; then
  echo "not installed: pycosat, for gym/zebra_puzzles: there is no C compiler, or no Python.h" >&2
  stand_ins+=(requirements/uncompiled/pycosat)
fi
packages --requirement <(grep -v '^pycosat==' "requirements/$device.lock")
# Compile the modules that every run imports, on all cores. They are a third of all code; Python compiles the rest when
# it first imports them.
"$venv/bin/python" - <<'PYTHON' || true
import compileall
import re
import sysconfig

for name in "torch vllm ray sympy transformers deepspeed numpy openai networkx pydantic fastapi aiohttp triton".split():
    folder = f"{sysconfig.get_paths()['purelib']}/{name}"
    compileall.compile_dir(folder, quiet=2, workers=0, rx=re.compile("transformers/models/|torch/testing/|/tests/"))
PYTHON
pip install --no-deps --no-build-isolation "${stand_ins[@]}" --editable .
[ "$device" != cpu ] || bash requirements/vision.sh "$venv/bin/python" || true
# vLLM's wheel works with every Python, but its file WHEEL names only 3.12, which newer releases of pip report.
problems=$("$venv/bin/python" -m pip --disable-pip-version-check check |
  grep -v -e '^vllm.* is not supported on this platform$' -e '^No broken requirements') || true
if [ -n "$problems" ]; then
  fail "the environment lacks what its packages need: ${problems//$'\n'/; }" "$venv" "remove $venv and run make install again"
fi

#!/usr/bin/env bash
# Installs the programs of agents.txt: requirements/agents.sh PYTHON FOLDER [NAME...]
# Links the commands in FOLDER/bin. Names the programs that it cannot install, installs all others, and then exits with 1.
set -uo pipefail
list=$(cd "$(dirname "$0")" && pwd)/agents.txt
python=$1
mkdir -p "$2/bin"
folder=$(cd "$2" && pwd)
shift 2

fail() {
  printf 'not installed: %s: %s\n' "$1" "$2" >&2
  failed=1
}

# Prints a Python that a package supports: PYTHON, or another one on this machine.
python_for() {
  local candidate
  for candidate in "$python" python3.12 python3.13 "$HOME"/.pyenv/versions/3.12.*/bin/python; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] < tuple(map(int, sys.argv[1].split("."))))' "$1" \
      2>/dev/null && echo "$candidate" && return
  done
  return 1
}

from_pypi() {
  local name=$1 least=3.11 made
  shift
  [ "$name" = openhands ] && least=3.12
  made=$(python_for "$least") || { fail "$name" "it needs Python $least"; return; }
  "$made" -m venv "$folder/$name" &&
    "$folder/$name/bin/python" -m pip --disable-pip-version-check --quiet install "$@" 2>"$folder/$name.log" ||
    { fail "$name" "$(grep -v '^WARNING' "$folder/$name.log" | tail -n 1 | cut -c 1-300)"; return; }
  case $name in
    mini-swe-agent) ln -sfn "../$name/bin/mini" "$folder/bin/mini" ;;
    aider) ln -sfn "../$name/bin/aider" "$folder/bin/aider" ;;
    openhands) # a library: its Python, for scripts; a link to it would not find its packages
      printf '#!/bin/sh\nexec "%s" "$@"\n' "$folder/$name/bin/python" >"$folder/bin/openhands-python"
      chmod +x "$folder/bin/openhands-python" ;;
  esac
}

from_npm() {
  local name=$1 command
  shift
  command -v npm >/dev/null || { fail "$name" "there is no npm"; return; }
  npm install --silent --no-fund --no-audit --prefix "$folder/$name" "$@" >"$folder/$name.log" 2>&1 ||
    { fail "$name" "$(tail -n 1 "$folder/$name.log" | cut -c 1-300)"; return; }
  for command in "$folder/$name"/node_modules/.bin/*; do
    ln -sfn "../$name/node_modules/.bin/$(basename "$command")" "$folder/bin/"
    "$command" --version >/dev/null 2>&1 || fail "$name" "$command does not start"
  done
}

failed=0
while read -r name source packages; do
  case $name in '#'* | '') continue ;; esac
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  # Installed already, with the versions in agents.txt.
  [ "$(cat "$folder/$name.installed" 2>/dev/null)" = "$packages" ] && continue
  before=$failed failed=0
  # shellcheck disable=SC2086  # one word each
  "from_$source" "$name" $packages </dev/null
  if [ "$failed" = 0 ]; then
    echo "$packages" >"$folder/$name.installed"
    echo "installed: $name ($packages)"
  fi
  failed=$((failed || before))
done <"$list"
exit "$failed"

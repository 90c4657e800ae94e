#!/usr/bin/env bash
#     bash requirements/sandboxes.sh [PACKAGE...]
#
# Installs the programs that sandboxes need from Debian or Ubuntu, bubblewrap and libseccomp2, and the packages in the
# arguments: `make test` also needs chromium, and for containers podman, runc and busybox-static. Needs root, or sudo
# without a password. Prints one line for each package that it cannot install, and exits with 0, because tests skip
# missing programs.
set -uo pipefail
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)

present() {
  case $1 in
    bubblewrap) command -v bwrap ;;
    libseccomp2) ldconfig -p 2>/dev/null | grep -q 'libseccomp\.so\.2' || ls /usr/lib/*/libseccomp.so.2 ;;
    podman | runc) command -v "$1" || ls /usr/sbin/"$1" ;;
    busybox-static) command -v busybox ;;
    chromium) command -v chromium || command -v chromium-browser || command -v google-chrome ;;
  esac >/dev/null 2>&1
}

apt() { "${as_root[@]}" apt-get -qq -o Dpkg::Use-Pty=0 "$@" </dev/null >"$log" 2>&1; }

missing=()
for package in bubblewrap libseccomp2 "$@"; do
  present "$package" || missing+=("$package")
done
[ ${#missing[@]} = 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
  reason="there is no apt-get"
elif ! "${as_root[@]}" true 2>/dev/null; then
  reason="it needs root, or sudo without a password"
else
  reason="" log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  apt update
fi
for package in "${missing[@]}"; do
  why=$reason
  if [ -z "$why" ]; then
    if apt install -y --no-install-recommends "$package"; then
      echo "installed: $package"
      continue
    fi
    why=$(tail -n 1 "$log" | cut -c 1-300)
  fi
  echo "not installed: $package: $why" >&2
done

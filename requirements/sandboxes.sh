#!/usr/bin/env bash
#     bash requirements/sandboxes.sh [PACKAGE...]
#
# Installs the programs that sandboxes need from Debian or Ubuntu: bubblewrap, libseccomp2 and gVisor's runsc, and the
# packages in the arguments: `make test` also needs chromium. Needs root, or sudo without a password. Prints one line for
# each package that it cannot install, and exits with 0, because tests skip missing programs.
set -uo pipefail
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)

present() {
  case $1 in
    bubblewrap) command -v bwrap ;;
    libseccomp2) ldconfig -p 2>/dev/null | grep -q 'libseccomp\.so\.2' || ls /usr/lib/*/libseccomp.so.2 ;;
    runsc) command -v runsc ;;
    chromium) command -v chromium || command -v chromium-browser || command -v google-chrome ;;
  esac >/dev/null 2>&1
}

apt() { "${as_root[@]}" apt-get -qq -o Dpkg::Use-Pty=0 "$@" </dev/null >"$log" 2>&1; }

# Debian 12's runsc is too old, so use its backports. The machine's list of sources stays unchanged.
backports() {
  local mirror
  [ "$(. /etc/os-release && echo "${VERSION_CODENAME:-}")" = bookworm ] || return 0
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
  mkdir -p "$scratch/lists/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm-backports main" >"$scratch/list"
  options=(-o "Dir::Etc::SourceList=$scratch/list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$scratch/lists")
  apt "${options[@]}" update
}

missing=()
for package in bubblewrap libseccomp2 runsc "$@"; do
  present "$package" || missing+=("$package")
done
[ ${#missing[@]} = 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
  reason="there is no apt-get"
elif ! "${as_root[@]}" true 2>/dev/null; then
  reason="it needs root, or sudo without a password"
else
  reason="" scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  chmod 0755 "$scratch" # apt reads its lists as another user
  log=$scratch/log
  apt update
fi
for package in "${missing[@]}"; do
  options=() why=$reason
  if [ -z "$why" ]; then
    if { [ "$package" != runsc ] || backports; } && apt "${options[@]}" install -y --no-install-recommends "$package"; then
      echo "installed: $package"
      continue
    fi
    why=$(tail -n 1 "$log" | cut -c 1-300)
  fi
  echo "not installed: $package: $why" >&2
done

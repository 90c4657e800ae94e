#!/usr/bin/env bash
# Installs gVisor's runsc, for `task.sandbox` with `kind: gvisor`, on Debian and Ubuntu (as root, or with sudo).
# Debian 12 itself has one that is too old; its backports have one that is not.
set -euo pipefail
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)
. /etc/os-release
if [ "${VERSION_CODENAME:-}" = bookworm ]; then
  sources=$(mktemp -d)
  trap '"${as_root[@]}" rm -rf "$sources"' EXIT
  chmod 0755 "$sources"
  mkdir -p "$sources/lists/partial"
  # The mirror that this machine uses already. Its own list of sources stays as it is.
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm-backports main" >"$sources/list"
  options=(-o "Dir::Etc::SourceList=$sources/list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$sources/lists")
else
  options=()
fi
"${as_root[@]}" apt-get "${options[@]}" update -qq
"${as_root[@]}" apt-get "${options[@]}" install -qq -y --no-install-recommends runsc
runsc --version

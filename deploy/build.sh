#!/usr/bin/env bash
# Builds the image of docker-compose.yml from a Debian that debootstrap makes, where no registry can be reached.
#
#   deploy/build.sh [ARGUMENT of podman build ...]
#
# The names are agl:latest, or AGL_IMAGE, and agl-base:latest, which is made once. Run it as root, which debootstrap needs.
# ENGINE=docker uses docker, SUITE names another Debian.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
engine="${ENGINE:-podman}" base=localhost/agl-base:latest
if ! "$engine" image inspect "$base" >/dev/null 2>&1; then
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    debootstrap --variant=minbase --include=python3-venv,ca-certificates "${SUITE:-bookworm}" "$work/root" >"$work/log" ||
        { tail "$work/log" >&2; exit 1; }
    tar -C "$work/root" --exclude='./var/cache/apt/*' --exclude='./dev/*' -c . | "$engine" import - "$base" >/dev/null
fi
"$engine" build --build-arg BASE="$base" --file "$here/Dockerfile" --tag "${AGL_IMAGE:-agl:latest}" "$@" "$(dirname "$here")"

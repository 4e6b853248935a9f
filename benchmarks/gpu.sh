#!/usr/bin/env bash
# The first hour on a GPU: see gpu.py. Without --cpu it makes its environment from a bundle of gpu_bundle.sh, beside the
# torch that the machine has, with no network: benchmarks/gpu.sh --bundle DIR [PART ...].
set -euo pipefail
cd "$(dirname "$0")/.."

bundle="" site="" rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --bundle) bundle="$2"; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
python="${PYTHON:-python3}"
if [ -n "$bundle" ]; then
    unpacked="$bundle/unpacked"
    if [ ! -f "$unpacked/done" ]; then
        compgen -G "$bundle/bundle.tar.xz.*" >/dev/null || { echo "gpu.sh: no bundle.tar.xz.* in $bundle" >&2; exit 1; }
        mkdir -p "$unpacked"
        cat "$bundle"/bundle.tar.xz.* | tar -x -J -C "$unpacked"
        touch "$unpacked/done"
    fi
    found="$("$python" -c 'import sys; print(sys.implementation.cache_tag)')" packed="$(cat "$unpacked/python")"
    if [ "$found" != "$packed" ]; then
        echo "gpu.sh: the bundle was packed for $packed, and $python is $found: name another with PYTHON=" >&2
        exit 1
    fi
    site="$unpacked/site:"  # before the interpreter's own packages, of which torch is one
    rest+=(--model "$(echo "$unpacked"/downloads/*.gguf)")
    export AGL_CACHE="$unpacked"
fi
export PYTHONPATH="$site$PWD/.src"
[[ " ${rest[*]} " == *" --cpu "* ]] || export AGL_TEST_DEVICE=cuda
exec "$python" benchmarks/gpu.py "${rest[@]}"

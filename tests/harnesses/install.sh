#!/usr/bin/env bash
# tests/harnesses/install.sh DIR [NAME ...]: install coding agents, in the versions that the suite has seen, below DIR, their
# programs in DIR/bin; all of them without names. Then AGL_HARNESSES=DIR pytest tests/integration/test_harnesses.py
set -euo pipefail
mkdir -p "$1/bin"
dir="$(cd "$1" && pwd)"
shift
[ $# -gt 0 ] || set -- mini aider codex opencode gemini qwen pi

node_package() { # NAME PACKAGE
    npm install --prefix "$dir/$1" --no-audit --no-fund --silent "$2"
    ln -sf "$dir/$1/node_modules/.bin/$1" "$dir/bin/$1"
}
python_package() { # each in an environment of its own, as they pin what they need
    python3 -m venv "$dir/$1"
    "$dir/$1/bin/pip" install --quiet "$2"
    ln -sf "$dir/$1/bin/$1" "$dir/bin/$1"
}
for name in "$@"; do
    case "$name" in
        mini) python_package mini mini-swe-agent==2.4.6 ;;
        aider) python_package aider aider-chat==0.86.2 ;;
        codex) node_package codex @openai/codex@0.171.0 ;;
        opencode) node_package opencode opencode-ai@1.18.33 ;;
        gemini) node_package gemini @google/gemini-cli@0.61.0 ;;
        qwen) node_package qwen @qwen-code/qwen-code@0.15.10 ;;
        pi) node_package pi @mariozechner/pi-coding-agent@0.73.1 ;;
        *) echo "unknown: $name" >&2; exit 2 ;;
    esac
done

#!/bin/sh
# Runs every benchmark in its quick form and puts its tables into pages of docs/: see all.py.
exec "${PYTHON:-python}" "$(dirname "$0")/all.py" "$@"

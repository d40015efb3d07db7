#!/bin/sh
# Print a Python that can make the virtual environment: 3.11 or newer, with the venv module.
# 3.11 comes first because it is the version the project is tested with.
set -u

for candidate in python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
        echo "$candidate"
        exit 0
    fi
done

echo "No Python 3.11 or newer with venv was found; install one, or run: make PYTHON=/path/to/python" >&2
exit 1

#!/usr/bin/env bash
# Create .venv and fill it from the lock files. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Forebay needs Python 3.11 or newer and found none: install it, or name it with PYTHON=/path/to/python3" >&2
    return 1
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "creating .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
echo "installing the locked dependencies"
# The build tools go in first, so that what has no wheel is built with locked tools too.
"${install[@]}" --require-hashes -r requirements-build.lock
"${install[@]}" --require-hashes --no-build-isolation -r requirements.lock
"${install[@]}" --no-deps --no-build-isolation --editable .

#!/usr/bin/env bash
# Run the quick tests with the other interpreters that Forebay supports, each in an environment of its own in .venv.
# Usage: tools/other_pythons.sh [INTERPRETER...]; without one, those of python3.12 and python3.13 that are on the PATH,
# or else the newest that pyenv has.
set -euo pipefail
cd "$(dirname "$0")/.."

find_interpreter() {
    local found
    found=$(compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/${1#python}.*/bin/$1" | sort -V | tail -n 1 || true)
    for candidate in "$1" "$found"; do
        # On the PATH may stand a shim of pyenv, which runs only what is chosen there.
        if [ -n "$candidate" ] && "$candidate" -c "" 2>/dev/null; then echo "$candidate"; return; fi
    done
    return 1
}

interpreters=("$@")
if [ $# -eq 0 ]; then
    for name in python3.12 python3.13; do
        if found=$(find_interpreter "$name"); then interpreters+=("$found"); else echo "$name is not here: not tested"; fi
    done
fi
failed=0
for interpreter in "${interpreters[@]}"; do
    version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    home=.venv/python$version
    if [ ! -x "$home/bin/python" ]; then "$interpreter" -m venv "$home"; fi
    install=("$home/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${install[@]}" --require-hashes -r requirements-build.lock
    "${install[@]}" --require-hashes --no-build-isolation -r requirements.lock
    "${install[@]}" --no-deps --no-build-isolation --editable .
    echo "== Python $version"
    "$home/bin/python" -m pytest -q -n 2 --dist loadgroup --hypothesis-profile quick -m "not slow and not spark" || failed=1
done
exit "$failed"

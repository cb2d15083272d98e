#!/usr/bin/env bash
# Write the lock files: exact versions and hashes, and nothing about where they were fetched from.
# Usage: tools/lock.sh (needs pip-compile, of pip-tools, on the PATH)
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
    local output=$1
    shift
    pip-compile --quiet --strip-extras --allow-unsafe --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
        --output-file "$output" "$@"
    # An extra that names others of the package makes the package itself a line, with the path it was read from.
    sed -i "/^#/d;/^$/d;/^forebay @/d" "$output"
}

# The build tools come first and apart: sdists in the other locks are built with them, without build isolation.
compile requirements-build.lock tools/build.in
compile requirements.lock --extra all --extra dev --extra docs --extra testing pyproject.toml tools/build.in
compile requirements-bench.lock --extra bench --constraint requirements.lock pyproject.toml
# Servers that tests start have an environment of their own: what they need need not agree with what we need.
compile requirements-servers.lock tools/servers.in
compile requirements-node.lock tools/node.in

# What a package is and which bytes it has: not where it was fetched from, nor what its authors say of themselves.
plain='
import json, sys
from pathlib import Path

path = Path(sys.argv[1])
lock = json.loads(path.read_text(encoding="utf-8"))
for package in lock["packages"].values():
    for name in ("resolved", "license", "funding"):
        package.pop(name, None)
path.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")
'
for packages in tests/blobs/azurite tests/broker/generated; do
    npm install --prefix "$packages" --package-lock-only --ignore-scripts --no-audit --no-fund --loglevel=error
    python3 -c "$plain" "$packages/package-lock.json"
done

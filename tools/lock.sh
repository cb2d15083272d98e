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

azurite=tests/blobs/azurite
npm install --prefix "$azurite" --package-lock-only --ignore-scripts --no-audit --no-fund --loglevel=error
sed -i '/^ *"resolved": /d;/^ *"license": /d' "$azurite/package-lock.json"

#!/usr/bin/env bash
# Run the checks in stages, go on after a failure, and say at the end how long each stage took.
# Usage: tools/run_tests.sh all|quick
set -euo pipefail
cd "$(dirname "$0")/.."

scope=${1:?usage: tools/run_tests.sh all|quick}
bin=.venv/bin
sources=()
for directory in src tests tools demo bench examples; do
    if [ -d "$directory" ]; then sources+=("$directory"); fi
done
report=()
failed=0

stage() {
    local name=$1 started=$EPOCHREALTIME verdict=passed
    shift
    echo "== $name"
    if ! "$@"; then
        verdict=FAILED
        failed=1
    fi
    report+=("$(awk -v name="$name" -v verdict="$verdict" -v start="$started" -v now="$EPOCHREALTIME" \
        'BEGIN {printf "%-10s %-7s %7.1f s", name, verdict, now - start}')")
}

stage lint "$bin/ruff" check "${sources[@]}"
stage format "$bin/ruff" format --check "${sources[@]}"
stage types "$bin/mypy"
stage contracts "$bin/lint-imports" --no-logo
case $scope in
    all) FOREBAY_BUDGETS=1 stage tests "$bin/python" -m pytest -q -n 3 --dist loadgroup ;;
    quick) stage tests "$bin/python" -m pytest -q -n 3 --dist loadgroup --hypothesis-profile quick \
        -m "not slow and not spark" ;;
    *) echo "unknown scope: $scope" >&2; exit 2 ;;
esac

printf '\n'
printf '%s\n' "${report[@]}"
exit "$failed"

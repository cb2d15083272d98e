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

# mypy keeps one core busy for most of a minute: what else comes before the tests runs beside it.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$bin/mypy" > "$types" 2>&1 &
mypy=$!
end_types() {
    local verdict=0
    wait "$mypy" || verdict=$?
    cat "$types"
    return "$verdict"
}

# pytest compiles each test file once. In a fresh clone every one of its processes would compile all of them.
compile_tests() {
    local said
    said=$("$bin/python" -m pytest --collect-only -q 2>&1) || { tail -n 50 <<< "$said"; return 1; }
}

stage lint "$bin/ruff" check "${sources[@]}"
stage format "$bin/ruff" format --check "${sources[@]}"
stage contracts "$bin/lint-imports" --no-logo
if ! compgen -G 'tests/__pycache__/test_*-pytest-*.pyc' > /dev/null; then
    stage compile compile_tests
fi
stage types end_types
case $scope in
    all) FOREBAY_BUDGETS=1 stage tests "$bin/python" -m pytest -q -n 4 --dist loadgroup ;;
    quick) stage tests "$bin/python" -m pytest -q -n 4 --dist loadgroup --hypothesis-profile quick \
        -m "not slow and not spark" ;;
    *) echo "unknown scope: $scope" >&2; exit 2 ;;
esac

printf '\n'
printf '%s\n' "${report[@]}"
exit "$failed"

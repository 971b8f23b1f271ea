#!/usr/bin/env bash
# Writes the lock files in scripts/lock again, which scripts/environment.sh installs from: scripts/lock.sh [uv arguments]
#
# Versions that are locked stay as far as setup.py allows; --upgrade takes the newest, --upgrade-package NAME one of them. Each
# file holds for every Python from 3.11 and every platform. Needs uv 0.5 or newer (pip install uv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# The build of torch depends on the machine, and that of CUDA on torch: scripts/environment.sh installs them without a lock.
machine='^(torch|triton|cuda-.*|nvidia-.*)=='

compile() { # name of the result, then arguments
  local name="$1"
  shift
  echo 'torch==2.13.0' > "$work/torch.txt"
  uv pip compile setup.py --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --constraint "$work/torch.txt" --output-file "$work/$name.txt" "$@"
}

# Prints what the second file has and the first has not, without what depends on the machine.
rest() {
  awk -v machine="$machine" '
    FILENAME == ARGV[1] { seen[$1] = 1; next }
    /^[^ ]/ { keep = !($1 in seen) && $1 !~ machine }
    keep' "$1" "$2"
}

extras=(dev deepspeed reasoning docs real)
cat scripts/lock/*.txt > "$work/all.txt"  # versions that uv prefers
compile all "${extras[@]/#/--extra=}" "$@"  # all at once, so that the files go together
compile core --constraint "$work/all.txt"
rest /dev/null "$work/core.txt" > scripts/lock/core.txt
for extra in "${extras[@]}"; do
  compile "$extra" --constraint "$work/all.txt" --extra "$extra"
  rest "$work/core.txt" "$work/$extra.txt" > "scripts/lock/$extra.txt"
done

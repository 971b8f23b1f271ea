#!/usr/bin/env bash
# Installs rl4llm with what the tests need, checks the style, and runs the tests: scripts/test.sh [pytest arguments]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # small tensors: more threads only wait for each other
ruff check .
exec python -m pytest "$@"

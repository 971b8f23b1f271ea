#!/usr/bin/env bash
# Makes the virtual environment that the other scripts use, or brings it up to date: . scripts/environment.sh [extra ...]
#
#   RL4LLM_VENV    where it lies (default: .venv in the repository)
#   RL4LLM_PYTHON  the Python 3.11 or newer to make it with (default: python3)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${RL4LLM_VENV:-$root/.venv}"
python="${RL4LLM_PYTHON:-python3}"
extras="$(IFS=,; echo "$*")"

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"rl4llm needs Python 3.11 or newer, but {sys.executable} is {sys.version.split()[0]}. Set RL4LLM_PYTHON.")
PY
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# What is installed depends on setup.py and the extras alone: when neither changed there is nothing to do.
stamp="$venv/rl4llm-installed"
want="$extras $(cksum < "$root/setup.py")"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
  echo "Installing rl4llm${extras:+ with $extras} into $venv: minutes, and without a word when all is well ..."
  if ! command -v nvidia-smi > /dev/null 2>&1 && [ "$(uname -s)" = Linux ]; then
    "$venv/bin/pip" install --quiet torch==2.13.0  # the CPU build; a range would bring gigabytes of CUDA
  fi
  "$venv/bin/pip" install --quiet -e "$root${extras:+[$extras]}"
  echo "$want" > "$stamp"
fi
export PATH="$venv/bin:$PATH"
cd "$root"

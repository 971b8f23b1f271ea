#!/usr/bin/env bash
# Begins a script that installs packages into a separate environment: . scripts/separate.sh WHAT VENV
#
# Creates VENV with a CPU build of torch and sets `venv`, `pip` and `root`; `installed` marks it as complete. Ends the script
# if VENV already has what this version of the script installs.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
set -euo pipefail

venv="$2"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
stamp="$venv/rl4llm-installed"
want="$(cksum < "${BASH_SOURCE[1]}")"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi
installed() { echo "$want" > "$stamp"; }

echo "Installing $1 into $venv ..."
"${RL4LLM_PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet torch==2.13.0  # first, so that what follows keeps this build

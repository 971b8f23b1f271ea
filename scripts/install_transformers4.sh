#!/usr/bin/env bash
# Installs the last transformers 4, which a test reads our model directories with, into a separate environment:
#
#   scripts/install_transformers4.sh VENV
#
# About a minute and 1.1 GB.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
set -euo pipefail

venv="${1:?usage: scripts/install_transformers4.sh VENV}"
stamp="$venv/rl4llm-transformers4-installed"
want="$(cksum < "${BASH_SOURCE[0]}")"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi

echo "Installing transformers 4 into $venv ..."
"${RL4LLM_PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet torch==2.13.0  # first, so that the next line keeps this build
"${pip[@]}" install --quiet transformers==4.57.6
echo "$want" > "$stamp"

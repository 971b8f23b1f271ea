#!/usr/bin/env bash
# Installs the Tinker SDK and its cookbook, which tests of `rl4llm serve tinker` run, into a separate environment:
#
#   scripts/install_tinker.sh VENV
#
# About two minutes and 1.6 GB.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
set -euo pipefail

venv="${1:?usage: scripts/install_tinker.sh VENV}"
stamp="$venv/rl4llm-tinker-installed"
want="$(cksum < "${BASH_SOURCE[0]}")"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi

echo "Installing the Tinker SDK into $venv ..."
"${RL4LLM_PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet torch==2.13.0  # first, so that the next line keeps this build
"${pip[@]}" install --quiet tinker==0.38.0 tinker-cookbook==0.5.8 datasets pylatexenc math-verify sympy
echo "$want" > "$stamp"

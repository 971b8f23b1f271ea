#!/usr/bin/env bash
# Installs verifiers, which tests of the environment `verifiers` run, into a separate environment:
#
#   scripts/install_verifiers.sh DIRECTORY
#
# It takes about a minute and 0.6 GB.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
set -euo pipefail

venv="${1:?usage: scripts/install_verifiers.sh DIRECTORY}" version=0.4.0
stamp="$venv/rl4llm-installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then exit; fi
echo "Installing verifiers $version into $venv ..."
"${RL4LLM_PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet "verifiers==$version"
echo "$version" > "$stamp"

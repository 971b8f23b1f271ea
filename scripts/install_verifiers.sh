#!/usr/bin/env bash
# Installs two versions of verifiers, which tests of the environment `verifiers` run, into separate environments:
#
#   scripts/install_verifiers.sh DIRECTORY
#
# DIRECTORY/v0 plays modules with `load_environment`, DIRECTORY/v1 those with a Taskset. About two minutes and 1.3 GB.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environments with (default: python3)
set -euo pipefail

directory="${1:?usage: scripts/install_verifiers.sh DIRECTORY}"
for pair in v0=0.1.14 v1=0.4.0; do
  venv="$directory/${pair%%=*}" version="${pair#*=}"
  stamp="$venv/rl4llm-installed"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then continue; fi
  echo "Installing verifiers $version into $venv ..."
  "${RL4LLM_PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "verifiers==$version"
  echo "$version" > "$stamp"
done

#!/usr/bin/env bash
# Installs the last transformers 4, which a test reads our model directories with, into a separate environment:
#
#   scripts/install_transformers4.sh VENV
#
# About a minute and 1.1 GB.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
. "$(dirname "${BASH_SOURCE[0]}")/separate.sh" "transformers 4" "${1:?usage: scripts/install_transformers4.sh VENV}"

"${pip[@]}" install --quiet transformers==4.57.6
installed

#!/usr/bin/env bash
# Installs the Tinker SDK and its cookbook, which tests of `rl4llm serve tinker` run, into a separate environment:
#
#   scripts/install_tinker.sh VENV
#
# About two minutes and 1.6 GB.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
. "$(dirname "${BASH_SOURCE[0]}")/separate.sh" "the Tinker SDK" "${1:?usage: scripts/install_tinker.sh VENV}"

"${pip[@]}" install --quiet tinker==0.38.0 tinker-cookbook==0.5.8 datasets pylatexenc math-verify sympy
installed

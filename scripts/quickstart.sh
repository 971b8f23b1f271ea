#!/usr/bin/env bash
# From a clone to a learning curve: installs rl4llm, builds a small model, warms it up, trains it with GRPO.
#
#   scripts/quickstart.sh [--seed 42] [--dir runs/quickstart]
#
# Ctrl-C stops cleanly; the same command goes on.
set -euo pipefail
arguments=("$@")
set --  # a sourced script would take them for names of extras
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec rl4llm quickstart ${arguments[@]+"${arguments[@]}"}

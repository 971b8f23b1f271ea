#!/usr/bin/env bash
# From a clone to a learning curve: installs rl4llm, builds a small model, warms it up, trains it with GRPO.
#
#   scripts/quickstart.sh [--seed 0] [--dir runs/quickstart]
#   scripts/quickstart.sh --real     # downloads SmolLM2-135M-Instruct instead, and trains it to solve sums: 10 to 30 minutes
#
# Ctrl-C stops cleanly; the same command resumes it.
set -euo pipefail
arguments=("$@")
set --  # a sourced script would take them for names of extras
for argument in ${arguments[@]+"${arguments[@]}"}; do
  if [ "$argument" = --real ]; then set -- real; fi  # reads the model of the package index
done
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec rl4llm quickstart ${arguments[@]+"${arguments[@]}"}

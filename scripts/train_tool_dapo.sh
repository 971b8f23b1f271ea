#!/usr/bin/env bash
# A policy learns to use a calculator, through an inference server; options are those of train_gsm8k_grpo.sh:
#
#   scripts/train_tool_dapo.sh [key.sub=value ...]
#   MODEL=models/small scripts/train_tool_dapo.sh max_steps=3
#   NPROC=2 scripts/train_tool_dapo.sh backend.name=deepspeed backend.zero_stage=3
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CONFIG="${CONFIG:-$here/../configs/arithmetic_tool_dapo.yaml}" exec "$here/train_gsm8k_grpo.sh" "$@"

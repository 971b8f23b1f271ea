#!/usr/bin/env bash
# Starts an SGLang server that rl4llm can train through: scripts/launch_sglang.sh [any flag of SGLang]
#
#   scripts/launch_sglang.sh --model-path Qwen/Qwen3-0.6B --port 30000 &         # first the server
#   rl4llm train configs/gsm8k_grpo.yaml inference.name=sglang                   # then the trainer
#   kill %1                                                                      # leaves none of its processes behind
#
# The trainer looks for it at SGLANG_BASE_URL, or at inference.url. For LoRA add --enable-lora --max-lora-rank 16, and to
# share a GPU with the trainer --enable-memory-saver. Without a GPU, for tests and small models: --cpu.
# --restarts 3 starts it again when it dies; the trainer then gives it the newest weights first.
#   RL4LLM_SGLANG_PYTHON  the Python of the environment that SGLang is installed in, see install_sglang_cpu.sh
set -euo pipefail
flags=("$@")
here="$PWD"
set --  # a sourced script would take them for names of extras
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$here"  # paths among the flags start here
exec python -m rl4llm.inference.launch_sgl_server ${flags[@]+"${flags[@]}"}

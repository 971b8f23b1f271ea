#!/usr/bin/env bash
# Starts a vLLM server that rl4llm can train through: scripts/launch_vllm.sh MODEL [any flag of vllm serve]
#
#   scripts/launch_vllm.sh Qwen/Qwen3-0.6B --port 8000 &                         # first the server
#   rl4llm train configs/gsm8k_grpo.yaml inference.name=vllm                     # then the trainer
#   kill %1                                                                      # leaves none of its processes behind
#
# The trainer looks for it at VLLM_BASE_URL, or at inference.url. For LoRA add --enable-lora --max-lora-rank 16, and to
# share a GPU with the trainer --enable-sleep-mode. Without a GPU, for tests and small models: --cpu.
# --restarts 3 starts it again when it dies; the trainer then gives it the newest weights first.
#   RL4LLM_VLLM_PYTHON  the Python of the environment that vLLM is installed in, see install_vllm_cpu.sh
set -euo pipefail
flags=("$@")
here="$PWD"
set --  # a sourced script would take them for names of extras
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$here"  # paths among the flags start here
exec rl4llm serve --engine vllm ${flags[@]+"${flags[@]}"}

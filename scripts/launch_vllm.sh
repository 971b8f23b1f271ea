#!/usr/bin/env bash
# Starts a vLLM server that rl4llm can train through: scripts/launch_vllm.sh MODEL [any flag of vllm serve]
#
#   scripts/launch_vllm.sh Qwen/Qwen3-0.6B --port 8000 &                         # first the server
#   rl4llm train configs/gsm8k_grpo.yaml inference.name=vllm                     # then the trainer
#
# The trainer looks for it at VLLM_BASE_URL, or at inference.url. For LoRA add --enable-lora --max-lora-rank 16, and to
# share a GPU with the trainer --enable-sleep-mode.
#   RL4LLM_VLLM_PYTHON  the Python of the environment that vLLM is installed in (default: python3)
set -euo pipefail

model="${1:?usage: scripts/launch_vllm.sh MODEL [any flag of vllm serve]}"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${RL4LLM_VLLM_PYTHON:-python3}"
export PATH="$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH"  # vLLM calls tools of its environment by name

export VLLM_SERVER_DEV_MODE=1                 # opens what replaces weights, pauses and sleeps: keep it off public networks
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True  # the same for adapters
export PYTHONPATH="$root/rl4llm/inference/servers${PYTHONPATH:+:$PYTHONPATH}"  # where the worker extension is

flags=(
  --host 127.0.0.1
  --port 8000
  --worker-extension-cls vllm_worker_extension.WeightsExtension  # loads new weights, and knows which version they are
  --logprobs-mode processed_logprobs  # what the policy sampled from, at any temperature; with top-p or top-k: raw_logprobs
)
if ! command -v nvidia-smi > /dev/null 2>&1; then
  export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"  # GB
  flags+=(--dtype float32 --enforce-eager)
fi
exec "$python" -m vllm.entrypoints.cli.main serve "$model" "${flags[@]}" "$@"

#!/usr/bin/env bash
# Engine and trainer take turns on one GPU: while one works, the other has given its memory away.
#
#   scripts/train_cohost.sh [key.sub=value ...]        # keys of the configuration
#
#   MODEL   a Hugging Face directory or name (default: Qwen/Qwen2.5-0.5B-Instruct)
#   PORT    where the server listens (default: 30000)
#   SHARE   of the GPU's memory that the engine may take while it is awake (default: 0.7)
set -euo pipefail
here="$PWD"
keys=("$@")
set --
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
. "$root/scripts/server.sh"
cd "$here"
model="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" port="${PORT:-30000}"
saver=()  # frees memory on CUDA only; on a CPU the same requests are answered and do nothing
command -v nvidia-smi > /dev/null 2>&1 && saver=(--enable-memory-saver --mem-fraction-static "${SHARE:-0.7}")

start_server sglang "$port" "$model" ${saver[@]+"${saver[@]}"}
rl4llm train "$root/configs/gsm8k_grpo.yaml" model.path="$model" \
  inference.name=sglang inference.url="http://127.0.0.1:$port" inference.cohost=true ${keys[@]+"${keys[@]}"}

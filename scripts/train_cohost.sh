#!/usr/bin/env bash
# Engine and trainer take turns on one GPU: while one works, the other has freed its memory.
#
#   scripts/train_cohost.sh [key.sub=value ...]        # keys of the configuration
#
#   CONFIG  the configuration (default: configs/gsm8k_24gb_full.yaml)
#   MODEL   a Hugging Face directory or name (default: the configuration's)
#   PORT    where the server listens (default: 30000)
#   SHARE   of the GPU's memory that the engine may take while it is awake (default: 0.7)
set -euo pipefail
here="$PWD"
keys=("$@")
set --
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
. "$root/scripts/server.sh"
cd "$here"
config="${CONFIG:-$root/configs/gsm8k_24gb_full.yaml}" port="${PORT:-30000}"
model="$(model_of "$config" ${MODEL:+model.path="$MODEL"} ${keys[@]+"${keys[@]}"})"
saver=()  # frees memory on CUDA only; on a CPU the same requests are answered and do nothing
command -v nvidia-smi > /dev/null 2>&1 && saver=(--enable-memory-saver --mem-fraction-static "${SHARE:-0.7}")

start_server sglang "$port" "$model" ${saver[@]+"${saver[@]}"}
rl4llm train "$config" model.path="$model" \
  inference.name=sglang inference.url="http://127.0.0.1:$port" inference.cohost=true ${keys[@]+"${keys[@]}"}

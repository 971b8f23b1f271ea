#!/usr/bin/env bash
# GRPO on GSM8K through an inference server: first the server, then the trainer; both are stopped at the end.
#
#   scripts/train_gsm8k_grpo.sh [key.sub=value ...]                    # keys of the configuration
#   MODEL=models/small scripts/train_gsm8k_grpo.sh data.path=DIRECTORY_WITH_train.jsonl_AND_test.jsonl max_steps=3
#
#   MODEL         a Hugging Face directory or name, as model.path=MODEL (default: Qwen/Qwen2.5-0.5B-Instruct)
#   ENGINE, PORT  sglang, vllm or embedded (default: sglang), and where it listens (default: 30000)
#   SERVER_FLAGS  further flags of the server, such as "--tp 2"
#   NPROC         processes that train together, such as one per GPU (default: 1); a run of several whose process dies is
#                 started again from its last checkpoint. backend.name=deepspeed takes DeepSpeed.
#   CONFIG        another configuration than configs/gsm8k_grpo.yaml
set -euo pipefail
here="$PWD"
keys=("$@")
case " $* " in *" backend.name=deepspeed "*) set -- deepspeed ;; *) set -- ;; esac  # what is installed
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
. "$root/scripts/server.sh"
cd "$here"
train=(rl4llm train)
[ "${NPROC:-1}" = 1 ] || train=(rl4llm launch --nproc "$NPROC" --restarts 3)
config="${CONFIG:-$root/configs/gsm8k_grpo.yaml}" default="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
model="$(model_of "$config" model.path="$default" ${keys[@]+"${keys[@]}"})"
engine="${ENGINE:-sglang}" port="${PORT:-30000}"

start_server "$engine" "$port" "$model" ${SERVER_FLAGS:-}
"${train[@]}" "$config" model.path="$model" \
  inference.name="$engine" inference.url="http://127.0.0.1:$port" ${keys[@]+"${keys[@]}"}

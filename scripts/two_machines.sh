#!/usr/bin/env bash
# The quickstart's task on two machines, which are network namespaces of this one; needs root, iproute2 and SGLang:
#
#   RL4LLM_SGLANG_PYTHON=VENV/bin/python scripts/two_machines.sh [key.sub=value ...]
#
#   MODEL   the warmed-up model of the quickstart (default: runs/quickstart/warm)
#   DIR     what both machines share (default: runs/two_machines)
#   TIMES   how often a server is added and one removed (default: 1)
#
# A process trains on each machine; servers are on both, a router on the first, the host of environments on the second. In the
# middle a server is added, and later one is removed. It prints how soon each was used or removed, and the rewards.
set -euo pipefail
here="$PWD"
keys=("$@")
set -- remote
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$here"
exec python "$root/scripts/two_machines.py" --model "${MODEL:-runs/quickstart/warm}" --dir "${DIR:-runs/two_machines}" \
  --times "${TIMES:-1}" ${keys[@]+"${keys[@]}"}

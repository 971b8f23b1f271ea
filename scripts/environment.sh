#!/usr/bin/env bash
# Creates or updates the virtual environment that the other scripts use: . scripts/environment.sh [extra ...]
#
#   RL4LLM_VENV    its directory (default: .venv in the repository)
#   RL4LLM_PYTHON  the Python 3.11 or newer that creates it (default: python3)
#
# On Linux, PyPI's build of torch brings CUDA. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu selects the CPU build, and
# cu126 instead of cpu one for older drivers.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${RL4LLM_VENV:-$root/.venv}"
python="${RL4LLM_PYTHON:-python3}"
extras="$(IFS=,; echo "$*")"

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"rl4llm needs Python 3.11 or newer, but {sys.executable} is {sys.version.split()[0]}. Set RL4LLM_PYTHON.")
PY
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"  # a failed attempt may leave one without pip

# What is installed depends on setup.py, the packages in extras/, the lock and the extras alone. There is nothing to do when
# the files are the same and no extra is missing.
stamp="$venv/rl4llm-installed" installed="" missing=""
if [ -f "$stamp" ]; then installed="$(cat "$stamp")"; fi
lock=("$root/scripts/lock/core.txt") unlocked=()
for extra in "$@"; do
  case ",${installed%% *}," in *",$extra,"*) ;; *) missing="${missing:+$missing,}$extra" ;; esac
  if [ -f "$root/scripts/lock/$extra.txt" ]; then lock+=("$root/scripts/lock/$extra.txt"); else unlocked+=("$extra"); fi
done
sum="$(cat "$root/setup.py" "$root"/extras/*/pyproject.toml "$root"/scripts/lock/*.txt | cksum)"
if [ -n "$missing" ] || [ "${installed#* }" != "$sum" ]; then
  echo "Installing rl4llm${extras:+ with $extras} into $venv: minutes, and without a word when all is well ..."
  rm -f "$stamp"  # a failed installation must not keep the stamp of an earlier one
  pip=("$venv/bin/python" -m pip install --quiet)
  # Every file must have the hash that the lock names. First come packages that building some of the others needs.
  "${pip[@]}" --no-deps --require-hashes -r "${lock[0]}" &&
    "${pip[@]}" --no-deps --require-hashes --no-build-isolation "${lock[@]/#/--requirement=}" || {
    echo "The packages of scripts/lock could not be installed into $venv: see the message of pip above. Where an index has" \
      "other files, \`scripts/lock.sh\` (needs uv) writes the lock again." >&2
    exit 1
  }
  # The build of torch depends on the machine, so the lock has neither torch nor CUDA. The version is the tested one everywhere.
  "${pip[@]}" torch==2.13.0
  unlocked="$(IFS=,; echo "${unlocked[*]-}")"
  packages=(-e "$root${unlocked:+[$unlocked]}")
  case ",$extras," in *,dev,*) for package in "$root"/extras/*/; do packages+=(-e "$package"); done ;; esac
  "${pip[@]}" --no-build-isolation "${packages[@]}"
  earlier="${installed%% *}"
  if [ "${installed#* }" = "$sum" ]; then extras="${earlier:+$earlier,}$missing"; fi  # what is installed stays
  echo "$extras $sum" > "$stamp"
fi
export PATH="$venv/bin:$PATH"
cd "$root"

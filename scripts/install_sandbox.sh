#!/usr/bin/env bash
# Installs bubblewrap, in which programs that a model wrote are run, where apt is available: scripts/install_sandbox.sh
#
# Where it is not, or may not be used, it says what is missing and goes on: everything but rewards and tools that run programs
# works without it, and those say at their start what they need.
set -euo pipefail

command -v bwrap > /dev/null 2>&1 && exit 0
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo -n"
if command -v apt-get > /dev/null 2>&1; then
  echo "Installing bubblewrap ..."
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get install --yes --quiet bubblewrap > /dev/null 2>&1 && exit 0
  { $sudo apt-get update --quiet && $sudo apt-get install --yes --quiet bubblewrap; } > /dev/null 2>&1 && exit 0
fi
cat >&2 << 'TEXT'
bubblewrap could not be installed: this needs apt-get, and root or sudo without a password. Install it with your system's
packages (dnf install bubblewrap, apk add bubblewrap, pacman -S bubblewrap). Without it rewards that run programs refuse to
start; sandbox.allow_weak=true lets them run under limits of memory, processes and time alone, which do not keep a program
from the files that you may read and write, from the network, or from your other processes where you are not root.
TEXT

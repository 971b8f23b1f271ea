#!/bin/sh
cd /work || exit 1
[ "$(readlink current)" = releases/1.10 ] && [ "$(cat current/program)" = new ]

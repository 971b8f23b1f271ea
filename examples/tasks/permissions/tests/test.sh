#!/bin/sh
cd /work || exit 1
[ "$(stat -c %a scripts/build.sh scripts/run.sh scripts/notes.txt | tr '\n' ' ')" = '700 700 644 ' ] && [ "$(./scripts/build.sh)" = build ]

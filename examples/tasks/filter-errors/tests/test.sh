#!/bin/sh
cd /work || exit 1
cmp errors.txt /tests/expected/errors.txt && cmp app.log /tests/expected/app.log

#!/bin/sh
cd /work || exit 1
cmp whole.txt /tests/expected

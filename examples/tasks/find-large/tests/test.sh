#!/bin/sh
cd /work || exit 1
cmp large.txt /tests/expected

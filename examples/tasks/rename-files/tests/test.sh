#!/bin/sh
cd /work || exit 1
diff -r /tests/expected /work

#!/bin/sh
cd /work || exit 1
gzip -t docs.tar.gz && mkdir -p /tmp/unpacked && tar -xzf docs.tar.gz -C /tmp/unpacked && diff -r /tests/expected /tmp/unpacked

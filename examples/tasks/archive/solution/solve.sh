#!/bin/sh
cd /work || exit 1
tar -czf docs.tar.gz docs

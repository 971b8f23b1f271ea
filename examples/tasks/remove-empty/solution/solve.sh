#!/bin/sh
cd /work || exit 1
find . -type f -empty -delete

#!/bin/sh
cd /work || exit 1
awk '!seen[$0]++' fruits.txt > unique.txt

#!/bin/sh
cd /work || exit 1
sort -rn numbers.txt > sorted.txt

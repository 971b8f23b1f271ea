#!/bin/sh
cd /work || exit 1
for i in 1 2 3 4 5 6 7 8 9 10 11; do cat parts/part-$i; done > whole.txt

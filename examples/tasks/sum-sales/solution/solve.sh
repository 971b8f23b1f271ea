#!/bin/sh
cd /work || exit 1
awk -F, 'NR > 1 { sum += $2 * $3 } END { print sum }' sales.csv > total.txt

#!/bin/sh
cd /work || exit 1
tr -cs 'A-Za-z' '\n' < story.txt | tr 'A-Z' 'a-z' | sort | uniq -c | sort -rn | awk 'NR == 1 { print $2, $1 }' > word.txt

#!/bin/sh
cd /work || exit 1
printf 'pear\napple\nfig\nkiwi\ndate\n' | cmp - unique.txt && [ "$(wc -l < fruits.txt)" -eq 8 ]

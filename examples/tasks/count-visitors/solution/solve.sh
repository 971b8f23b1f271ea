#!/bin/sh
cd /work || exit 1
cut -d' ' -f1 access.txt | sort -u | wc -l > visitors.txt

#!/bin/sh
cd /work || exit 1
tail -n +2 people.csv | cut -d, -f2 | sort > names.txt

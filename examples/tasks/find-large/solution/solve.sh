#!/bin/sh
cd /work || exit 1
find data -type f -size +1000c | LC_ALL=C sort > large.txt

#!/bin/sh
cd /work || exit 1
wc -w < poem.txt > count.txt

#!/bin/sh
cd /work || exit 1
printf 'red\ngreen\nblue\n' | cmp - colours.txt

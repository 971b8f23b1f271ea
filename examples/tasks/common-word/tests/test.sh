#!/bin/sh
cd /work || exit 1
[ "$(cat word.txt)" = 'the 6' ]

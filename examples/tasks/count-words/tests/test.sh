#!/bin/sh
cd /work || exit 1
[ "$(cat count.txt)" = 21 ]

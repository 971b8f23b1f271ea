#!/bin/sh
cd /work || exit 1
[ "$(cat total.txt)" = 345 ]

#!/bin/sh
cd /work || exit 1
[ "$(cat visitors.txt)" = 3 ]

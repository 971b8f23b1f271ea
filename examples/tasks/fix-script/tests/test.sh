#!/bin/sh
cd /work || exit 1
[ "$(sh greet.sh Ada)" = 'Hello, Ada!' ] && [ "$(sh greet.sh)" = 'Hello, world!' ] && [ "$(sh greet.sh 'Ada L')" = 'Hello, Ada L!' ]

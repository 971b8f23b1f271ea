#!/bin/sh
cd /work || exit 1
printf '%s\n' '#!/bin/sh' '# Greets somebody, or the world.' 'name=${1:-world}' 'echo "Hello, $name!"' > greet.sh

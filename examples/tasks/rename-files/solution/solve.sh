#!/bin/sh
cd /work || exit 1
for file in *.text; do mv "$file" "${file%.text}.md"; done

#!/bin/sh
cd /work || exit 1
mkdir logs && mv *.log logs/

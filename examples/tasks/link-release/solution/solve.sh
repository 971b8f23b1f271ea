#!/bin/sh
cd /work || exit 1
ln -s releases/1.10 current

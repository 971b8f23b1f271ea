#!/bin/sh
cd /work || exit 1
cp -R src backup

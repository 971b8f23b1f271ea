#!/bin/sh
cd /work || exit 1
grep ' ERROR ' app.log > errors.txt

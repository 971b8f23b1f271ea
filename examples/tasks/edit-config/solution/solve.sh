#!/bin/sh
cd /work || exit 1
sed -i '/^\[proxy\]/,$ s/^port = 8080$/port = 9090/' settings.ini

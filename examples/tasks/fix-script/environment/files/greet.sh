#!/bin/sh
# Greets somebody, or the world.
name = ${1:-world}
echo 'Hello, $name!'

#!/bin/sh
# Gives the Triton language's cache the C module that was compiled with the image, then becomes its arguments.
# The cache may be an empty volume at every start; what lies in it already stays.
set -eu
mkdir -p "$TRITON_CACHE_DIR"
cp -Rn /opt/octavo/triton-cache/. "$TRITON_CACHE_DIR"/
exec "$@"

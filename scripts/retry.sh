#!/bin/sh
# Runs a command that needs the network, again with pauses when it fails: mirrors drop out for minutes.
for pause in 5 15 30 60 120; do
    "$@" && exit 0
    echo "failed: $*; next try in $pause s" >&2
    sleep "$pause"
done
exec "$@"

#!/bin/sh
# Run `fedapp supernode` with the given arguments, and start it again when it fails.
#
# A SuperLink considers a lost node (power cut, kill -9) online until two heartbeats of 30 s are missing, and refuses it
# until then (exit code 305). An immediate restart would fail, so the script waits RESTART_AFTER seconds (default 65).
# SIGTERM and SIGINT stop the SuperNode properly, without a restart. Only then it ends with code 0.
set -u

stopping=
child=
stop() {
  stopping=yes
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null
}
trap stop TERM INT

while :; do
  fedapp supernode "$@" &
  child=$!
  wait "$child"
  code=$?
  # A signal ends the first wait at once, so wait again until the SuperNode has stopped.
  [ -z "$stopping" ] || { wait "$child"; exit 0; }
  [ "$code" -ne 0 ] || exit 0
  echo "supernode.sh: the SuperNode ended with code $code; next try in ${RESTART_AFTER:-65} s" >&2
  sleep "${RESTART_AFTER:-65}" &
  child=$!
  wait "$child"
  [ -z "$stopping" ] || exit 0
done

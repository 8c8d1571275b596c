#!/bin/sh
# Run flower-supernode with the arguments given, and start it again when it fails.
#
# A SuperLink takes a node that vanished (power cut, kill -9) for online until two heartbeats of 30 s are missing, and
# refuses it until then (exit code 305). RESTART_AFTER, default 65 seconds, waits that long: an immediate restart would
# only fail. SIGTERM and SIGINT end the SuperNode in order and are no reason to start it again.
set -u

stopping=
child=
stop() {
  stopping=yes
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null
}
trap stop TERM INT

while :; do
  flower-supernode "$@" &
  child=$!
  wait "$child"
  code=$?
  # A signal ends the first wait at once; the second one waits for the SuperNode itself.
  [ -z "$stopping" ] || { wait "$child"; exit 0; }
  [ "$code" -ne 0 ] || exit 0
  echo "supernode.sh: flower-supernode ended with code $code; next try in ${RESTART_AFTER:-65} s" >&2
  sleep "${RESTART_AFTER:-65}" &
  child=$!
  wait "$child"
  [ -z "$stopping" ] || exit 0
done

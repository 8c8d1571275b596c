#!/bin/sh
# Make the key pair of each SuperNode: NAME stays on the node, NAME.pub is registered with the SuperLink.
#
#   docker/keys.sh DIR NAME [NAME ...]
#
# Register each one where Flower's configuration names the SuperLink:   flwr supernode register DIR/NAME.pub CONNECTION
# A key that is there already is kept. Best made on the node itself, so that the private key never travels.
set -eu

[ $# -ge 2 ] || { echo "usage: $0 DIR NAME [NAME ...]" >&2; exit 2; }
dir=$1
shift

umask 077
mkdir -p "$dir"
for name in "$@"; do
  if [ -f "$dir/$name" ]; then
    echo "$dir/$name is kept"
    continue
  fi
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "$name" -f "$dir/$name"
  chmod 644 "$dir/$name.pub"
  echo "$dir/$name made"
done

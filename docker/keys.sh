#!/bin/sh
# Make the key pair of each SuperNode: NAME stays on the node, NAME.pub is registered with the SuperLink.
#
#   docker/keys.sh DIR NAME [NAME ...]
#
# Admit each public key on the server, with the client id of this node:
#
#   fedapp admit DIR/NAME.pub --client 0 --superlink CONNECTION --roster FILE
#
# An existing key is kept. Run the script on the node itself, so that the private key never leaves it.
set -eu

[ $# -ge 2 ] || { echo "usage: $0 DIR NAME [NAME ...]" >&2; exit 2; }
dir=$1
shift

umask 077
mkdir -p "$dir"
for name in "$@"; do
  if [ -f "$dir/$name" ]; then
    echo "$dir/$name exists and is kept"
    continue
  fi
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "$name" -f "$dir/$name"
  chmod 644 "$dir/$name.pub"
  echo "$dir/$name was made"
done

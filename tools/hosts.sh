#!/bin/sh
# Hosts with addresses of their own on one machine, to try a deployment on a network: each is a network namespace, and a
# bridge in one more namespace joins them. Nothing else of the machine's network changes. Needs root and iproute2.
#
#   tools/hosts.sh up NET HOST=ADDRESS/BITS ...    make the network NET; ip netns exec NET-HOST COMMAND runs there
#   tools/hosts.sh cut NET HOST                    pull out the host's cable: nothing passes, and nobody is told
#   tools/hosts.sh join NET HOST                   put it back
#   tools/hosts.sh slow NET HOST RATE              such as 1mbit, in each direction
#   tools/hosts.sh move NET HOST ADDRESS/BITS      another address, which the name means from then on
#   tools/hosts.sh down NET                        remove all of it; processes in there go on without a network
#
# Hosts know each other by name, from /etc/hosts as `ip netns exec` shows it. Names have at most 15 characters.
set -eu

[ $# -ge 2 ] || { sed -n '5,10s/^# *//p' "$0" >&2; exit 2; }
command=$1 net=$2
shift 2

known() { # the names and addresses of all hosts
  for folder in /etc/netns/"$net"-*; do
    ip -n "${folder##*/}" -4 -o address show dev eth0 \
      | sed -n "s#.*inet \([0-9.]*\)/.*#\1 ${folder##*/"$net"-}#p"
  done
}

tell() { # write the names into the hosts file of each; in place, for it is mounted where a process runs
  all=$(printf '127.0.0.1 localhost\n::1 localhost\n'; known)
  for folder in /etc/netns/"$net"-*; do
    echo "$all" > "$folder/hosts"
  done
}

case $command in
  up)
    ip netns add "$net"
    ip -n "$net" link add name bridge type bridge
    ip -n "$net" link set dev bridge up
    for host in "$@"; do
      name=${host%%=*}
      mkdir -p "/etc/netns/$net-$name"
      ip netns add "$net-$name"
      ip -n "$net" link add name "$name" type veth peer name eth0 netns "$net-$name"
      ip -n "$net" link set dev "$name" master bridge up
      ip -n "$net-$name" address add "${host#*=}" dev eth0
      ip -n "$net-$name" link set dev lo up
      ip -n "$net-$name" link set dev eth0 up
    done
    tell
    ;;
  cut) ip -n "$net" link set dev "$1" down ;;
  join) ip -n "$net" link set dev "$1" up ;;
  slow)
    ip netns exec "$net" tc qdisc replace dev "$1" root tbf rate "$2" burst 16kb latency 400ms
    ip netns exec "$net-$1" tc qdisc replace dev eth0 root tbf rate "$2" burst 16kb latency 400ms
    ;;
  move)
    ip -n "$net-$1" address flush dev eth0
    ip -n "$net-$1" address add "$2" dev eth0
    tell
    ;;
  down)
    for folder in /etc/netns/"$net"-*; do
      [ ! -d "$folder" ] || { ip netns delete "${folder##*/}" || true; rm -r "$folder"; }
    done
    ip netns delete "$net"
    ;;
  *) echo "$0: no such command: $command" >&2; exit 2 ;;
esac

#!/bin/sh
# Make the federation's own certificate authority, and a server certificate for its SuperLink.
#
#   docker/certs.sh DIR NAME-OR-ADDRESS ...
#
# The certificate holds for exactly these names and addresses: those by which nodes know the server, and localhost and
# 127.0.0.1, where the SuperLink itself and its operator reach it.
# Writes DIR/ca.key, ca.crt, server.key and server.crt. An existing authority is kept, so running the script again renews
# the server's certificate and the nodes need no change. Copy only ca.crt to the nodes and to the machines that submit
# runs. Keep ca.key away from all machines of the federation.
# USE=clientAuth makes a certificate that an operator shows (docker/nginx.conf), in a folder with an authority of its own.
# DAYS (default 365) is the validity of the server's certificate, CA_DAYS (default 3650) that of the authority.
set -eu

[ $# -ge 2 ] || { echo "usage: $0 DIR NAME-OR-ADDRESS ...   (as superlink.example.org localhost 127.0.0.1)" >&2; exit 2; }
dir=$1
shift

umask 077
mkdir -p "$dir"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ ! -f "$dir/ca.key" ] || [ ! -f "$dir/ca.crt" ]; then
  openssl ecparam -name prime256v1 -genkey -noout -out "$dir/ca.key"
  cat > "$work/ca.cnf" <<EOF
[req]
distinguished_name = name
x509_extensions = authority
prompt = no
[name]
O = fedapp
CN = fedapp authority
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
EOF
  openssl req -new -x509 -sha256 -key "$dir/ca.key" -days "${CA_DAYS:-3650}" -config "$work/ca.cnf" -out "$dir/ca.crt"
fi

names=
for name in "$@"; do
  case $name in
    *:* | *[0-9].[0-9]*.[0-9]*.[0-9]*) kind=IP ;;
    *) kind=DNS ;;
  esac
  names="${names:+$names, }$kind:$name"
done
cat > "$work/server.cnf" <<EOF
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = ${USE:-serverAuth}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $names
EOF
# A key without its certificate would keep the SuperLink from starting, so both are replaced once both are made.
openssl ecparam -name prime256v1 -genkey -noout -out "$work/server.key"
openssl req -new -sha256 -key "$work/server.key" -subj "/O=fedapp/CN=$1" -out "$work/server.csr"
openssl x509 -req -sha256 -in "$work/server.csr" -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -CAcreateserial \
  -CAserial "$work/serial" -days "${DAYS:-365}" -extfile "$work/server.cnf" -out "$work/server.crt" 2> "$work/errors" ||
  { cat "$work/errors" >&2; exit 1; }
mv -f "$work/server.key" "$work/server.crt" "$dir/"
chmod 644 "$dir/ca.crt" "$dir/server.crt"
echo "$dir: server certificate for $names, valid until $(openssl x509 -in "$dir/server.crt" -noout -enddate | cut -d= -f2)"

#!/bin/sh
# docker/smoke.sh on a machine without a Docker daemon and without a registry of images: the image is built by buildah on a
# base made by debootstrap, and compose.yml's services run in it, as runc's containers (tools/docker_on_runc.py). Needs
# root, Debian's buildah, debootstrap, runc and iproute2, 25 GB of disk, and a Python with PyYAML (PYTHON).
#
#   tools/check-image.sh [FOLDER]     FOLDER keeps the base and the image's layers for the next time
#
# PIP_CONF: pip's configuration while the image is built, for a package index of your own.
# The base has Debian's Python of the same minor version, and trusts the certificates that this machine trusts.
set -eu

for tool in buildah debootstrap runc ip openssl ssh-keygen; do
  command -v "$tool" > /dev/null || { echo "$0: $tool is not installed" >&2; exit 2; }
done
[ "$(id -u)" -eq 0 ] || { echo "$0: root is needed" >&2; exit 2; }

if [ $# -gt 0 ]; then
  mkdir -p "$1"
  CHECK_FOLDER=$(cd "$1" && pwd)
else
  CHECK_FOLDER=$(mktemp -d)
  # buildah mounts its own storage.
  trap 'umount "$CHECK_FOLDER/storage/overlay" 2> /dev/null || true; rm -rf --one-file-system "$CHECK_FOLDER"' EXIT
fi
cd "$(dirname "$0")/.."
BASE_IMAGE=localhost/fedapp-base
CONTAINERS_STORAGE_CONF=$CHECK_FOLDER/storage.conf
DOCKER="${PYTHON:-python3} tools/docker_on_runc.py"
if [ -z "${PIP_CONF:-}" ]; then
  PIP_CONF=$CHECK_FOLDER/pip.conf
  # pip has a list of authorities of its own, and would not look at the base's.
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' > "$PIP_CONF"
fi
export CHECK_FOLDER BASE_IMAGE CONTAINERS_STORAGE_CONF DOCKER PIP_CONF

cat > "$CONTAINERS_STORAGE_CONF" << EOF
[storage]
driver = "overlay"
graphroot = "$CHECK_FOLDER/storage"
runroot = "$CHECK_FOLDER/run"
EOF

if ! buildah inspect --type image "$BASE_IMAGE" > /dev/null 2>&1; then
  printf '\n== base\n'
  tree=$CHECK_FOLDER/base
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$tree"
  cp /etc/ssl/certs/ca-certificates.crt "$tree/etc/ssl/certs/"
  chroot "$tree" python3 -m venv /usr/local
  base=$(buildah from scratch)
  buildah add --quiet "$base" "$tree" /
  buildah config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$base"
  buildah commit --quiet --rm "$base" "$BASE_IMAGE"
  rm -rf "$tree"
fi

docker/smoke.sh

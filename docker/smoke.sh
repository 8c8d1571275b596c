#!/bin/sh
# Test every step once, in containers: build, certificates, keys, three sites with handwritten digits, two rounds, a node's
# predictions, one node killed, a run without it, and a run after its restart. Needs a Docker daemon with Compose v2 and
# about ten minutes.
#
#   docker/smoke.sh            removes the containers at the end; KEEP=yes leaves them running
#
# DOCKER: another program that does what `docker` does here (tools/check-image.sh).
# Exit code 0: every step succeeded.
set -eu

cd "$(dirname "$0")/.."
docker=${DOCKER:-docker}
compose="$docker compose -f docker/compose.yml -p fedapp-smoke"
user=10001

cleanup() {
  code=$?
  if [ "$code" -ne 0 ]; then
    $compose logs --tail 50 || true
  fi
  [ "${KEEP:-}" = yes ] || $compose down --volumes --timeout 30 || true
  exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

say() { printf '\n== %s\n' "$*"; }
in_superlink() { $compose exec -T superlink "$@"; }
good() { # good RUN: succeeds if the run's summary says that it succeeded
  in_superlink python -c "import json, sys; s = json.load(open(sys.argv[1])); sys.exit(0 if s['ok'] else str(s))" \
    "/var/lib/fedapp/runs/$1/summary.json"
}

say "certificates and keys"
docker/certs.sh docker/certs superlink localhost 127.0.0.1
docker/keys.sh docker/keys supernode-0 supernode-1 supernode-2

say "image"
$compose build superlink

say "data of three sites; owner of the private files"
mkdir -p docker/sites
$docker run --rm --user 0 -e FEDAPP_CACHE=/tmp/cache -v "$PWD/docker:/setup" fedapp:0.2.0 \
  sh -c "python /setup/sites.py /setup/sites --owner $user && chmod -R a+rX /setup/sites \
         && chown $user /setup/certs/server.key /setup/keys/supernode-0 /setup/keys/supernode-1 /setup/keys/supernode-2"

say "SuperLink"
$compose up -d --wait superlink
in_superlink fedapp operator login superlink --token-file /var/lib/fedapp/operator.token
for node in 0 1 2; do
  in_superlink fedapp admit "/keys/supernode-$node.pub" --client "$node" --superlink superlink
done

say "every package of the image is one of constraints.txt"
in_superlink sh -c "
  pip freeze --exclude fedapp | sed 's/+cpu\$//' | tr A-Z_ a-z- | sort > /tmp/there
  tr A-Z_ a-z- < /opt/fedapp/constraints.txt | sort > /tmp/named
  ! comm -23 /tmp/there /tmp/named | grep ."

say "nodes"
MODEL_0=digits-a MODEL_1=digits-b MODEL_2=digits-c
export MODEL_0 MODEL_1 MODEL_2
$compose up -d --wait
in_superlink fedapp deploy check --superlink superlink --certificate /run/secrets/server.crt
$compose exec -T supernode-0 fedapp deploy check --address superlink:8000 --root-certificates /run/secrets/ca.crt \
  --key /run/secrets/supernode-0 --node-config "client-id=0 data-path='/data' model='digits-a'"

say "two rounds with three architectures"
in_superlink fedapp run --engine deploy --superlink superlink --rounds 2 --clients 3 --out /var/lib/fedapp/runs/first
good first

say "the own model of supernode-0 on its test images"
$compose exec -T supernode-0 python -c "
import subprocess, sys
import numpy as np
from PIL import Image

with np.load('/data/data.npz') as data:
    images, labels = data['x_test'][:10, :, :, 0], data['y_test'][:10]
files = [f'/tmp/{i}.png' for i in range(10)]
for file, image in zip(files, images):
    Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(file)
model = '/var/lib/fedapp/state/run/0/personal.safetensors'
done = subprocess.run(['fedapp', 'predict', '--model', model, '--top', '1', *files], check=True, stdout=-1, text=True)
right = sum(line.split('\t')[1] == str(label) for line, label in zip(done.stdout.splitlines(), labels))
sys.exit(0 if right >= 7 else f'{right} of 10 are right:\n{done.stdout}')"

say "kill supernode-2 and run a round without it"
$compose kill --signal SIGKILL supernode-2
in_superlink fedapp run --engine deploy --superlink superlink --rounds 1 --clients 3 --set wait-timeout=90 \
  --out /var/lib/fedapp/runs/two-nodes
good two-nodes

say "restart supernode-2: it continues with its own model"
$compose up -d --wait supernode-2
in_superlink fedapp run --engine deploy --superlink superlink --rounds 1 --clients 3 --set warm-start=true \
  --out /var/lib/fedapp/runs/warm
good warm

say "every step succeeded"

#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the Dockerfile's stages over /base.tar, which stands in for the image debian:12-slim, and runs
# them. Runs as root in a fresh Debian system with buildah.
#
# usage: check_containers.sh

set -eu

export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot # needs no overlayfs and no namespaces

base=$(buildah from scratch)
buildah add --quiet "$base" /base.tar / > /dev/null
buildah commit --quiet --rm "$base" docker.io/library/debian:12-slim > /dev/null

for stage in wheel demo; do
    echo "image $stage"
    buildah bud --pull-never --layers=false --volume /wheels:/wheels:ro \
        --file /src/packaging/containers/Dockerfile --ignorefile /src/.dockerignore \
        --target "$stage" --tag "vmem-$stage" /src > /log 2>&1 || {
        tail -n 40 /log
        exit 1
    }
done

wheel=$(buildah from --pull-never vmem-wheel)
ls "$(buildah mount "$wheel")"/pyvmem-*.whl

demo=$(buildah from --pull-never vmem-demo)
[ "$(buildah run "$demo" -- id -u)" = 1000 ]
start=$(buildah inspect --format '{{index .OCIv1.Config.Entrypoint 0}} {{index .OCIv1.Config.Cmd 0}}' "$demo")
# shellcheck disable=SC2086 # split into the words of a command
buildah run "$demo" -- $start --num-prompts 2 --max-new-tokens 4

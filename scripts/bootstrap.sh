#!/bin/sh
# Prints the path of a uv that runs; where there is none, puts one into the data directory. Needs Python 3.11+ and apt-get.
set -eu
data=${CPUOS_DATA_DIR:-/var/lib/cpuos}

works() { [ -n "$1" ] && "$1" --version >/dev/null 2>&1; }

for candidate in "${UV:-}" "$data/bin/uv" "$(command -v uv || true)"; do
    if works "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done

# Mirrors drop out for minutes: each download gets several tries.
retry() {
    for pause in 5 15 30 60 120 0; do
        "$@" >&2 && return 0
        [ "$pause" = 0 ] && return 1
        echo "failed: $*; next try in $pause s" >&2
        sleep "$pause"
    done
}

if ! mkdir -p "$data/bin" "$data/cache" 2>/dev/null; then
    echo "cannot install uv: $data is not writable" >&2
    echo "try: sudo make ${1:-setup}" >&2
    exit 1
fi
if ! command -v python3 >/dev/null || ! python3 -m pip --version >/dev/null 2>&1; then
    echo "installing python3-pip, to fetch uv with" >&2
    retry apt-get -o DPkg::Lock::Timeout=300 update
    retry env DEBIAN_FRONTEND=noninteractive \
        apt-get -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends python3 python3-pip
fi
echo "fetching uv" >&2
folder=$(mktemp -d "$data/cache/uv.XXXXXX")
trap 'rm -rf "$folder"' EXIT
retry python3 -m pip install --quiet --no-deps --root-user-action=ignore --no-warn-script-location \
    --only-binary :all: --require-hashes --requirement "$(dirname "$0")/uv.txt" --target "$folder"
install -m 0755 "$folder/bin/uv" "$data/bin/.uv.$$"
mv -f "$data/bin/.uv.$$" "$data/bin/uv"
works "$data/bin/uv"
echo "$data/bin/uv"

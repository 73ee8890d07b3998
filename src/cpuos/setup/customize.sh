#!/bin/sh
# Turns a fresh root into a template: run by mmdebstrap with the root as $1 and the files to lay over it as $2.
set -eu
root=$1
files=$2

chroot "$root" adduser --quiet --disabled-password --gecos "" --uid 1000 user
chroot "$root" adduser --quiet user sudo
# fqdn would have sudo ask a name server for the sandbox's own name, which has no answer.
# The command's id stays readable behind sudo, so that what it does can be told apart.
printf 'Defaults !fqdn\nDefaults env_keep += "CPUOS_COMMAND"\nuser ALL=(ALL:ALL) NOPASSWD:ALL\n' > "$root/etc/sudoers.d/cpuos"
chmod 0440 "$root/etc/sudoers.d/cpuos"

install -d -m 0755 "$root/.cpuos" "$root/var/log/cpuos" "$root/home/user/.local" "$root/home/user/.local/bin"
install -d -m 0755 "$root/workspace"
chroot "$root" chown -R user:user /workspace /home/user/.local

# A mirror or a proxy of the build machine is of no use, and no business, of a sandbox.
rm -rf "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/* "$root"/etc/apt/auth.conf "$root"/etc/apt/auth.conf.d \
    "$root"/etc/apt/apt.conf.d/99mmdebstrap
printf 'Apt::Install-Recommends "false";\nAcquire::Languages "none";\nAcquire::Retries "3";\n' > "$root/etc/apt/apt.conf.d/90cpuos"

cat > "$root/etc/environment" <<'END'
PATH="/home/user/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LANG="C.UTF-8"
END
printf 'LANG=C.UTF-8\n' > "$root/etc/default/locale"
printf 'nameserver 10.0.0.1\noptions timeout:2 attempts:2\n' > "$root/etc/resolv.conf"
printf 'cpuos\n' > "$root/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 cpuos\n::1 localhost ip6-localhost ip6-loopback\n' > "$root/etc/hosts"
: > "$root/etc/machine-id"
rm -f "$root/var/lib/dbus/machine-id"
# The day a password was last changed is the day of the build.
sed -i -E 's/^([^:]*:[^:]*:)[0-9]+:/\120089:/' "$root/etc/shadow"
rm -f "$root/etc/shadow-" "$root/etc/passwd-" "$root/etc/group-" "$root/etc/gshadow-"

cp -r "$files/." "$root/"
if [ -d "$files/usr/local/share/ca-certificates" ]; then
    chroot "$root" update-ca-certificates
fi

# `pip install` is what an agent does; the root is thrown away with the sandbox.
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
if [ -e "$root/usr/lib/python3/dist-packages/matplotlib" ]; then
    # The list of fonts takes seconds to make at the first chart. The seed: equal packages give equal lists.
    chroot "$root" su user -c 'cd && PYTHONHASHSEED=0 MPLBACKEND=agg python3 -c "import matplotlib.pyplot"'
fi

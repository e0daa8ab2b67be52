#!/bin/sh
# Makes what compose.yaml reads in secrets/: passwords of the database and of Redis, and the
# addresses with them. What is there stays. The folder is for its owner alone; the files in it are
# not, because each container reads its own as another user.
set -eu
cd "$(dirname "$0")"
mkdir -p -m 0700 secrets
cd secrets
make() { # NAME TEXT
    [ -s "$1" ] || printf '%s' "$2" >"$1"
    chmod 0444 "$1"
}
password() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
make database_password "$(password)"
make redis_password "$(password)"
make database_url "postgresql://slipway:$(cat database_password)@database:5432/slipway"
make redis_url "redis://:$(cat redis_password)@redis:6379/0"

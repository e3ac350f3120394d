#!/bin/sh
# Run the tests against checkouts of NeMo RL, each in turn, in an environment of their own.
#   NEMO_RL_HOME=/path[:/path2] tests/nemo_rl/run.sh [PYTEST ARGS]
#   VENV: the environment (.venv-nemo); PYTHON: the Python it is made with
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${VENV:-"$root/.venv-nemo"}

if [ -z "${NEMO_RL_HOME:-}" ]; then
    echo "Skipped: NEMO_RL_HOME is not set, so there is no checkout of NeMo RL to test against." >&2
    exit 0
fi

# Without bytecode on disk every Ray worker would compile torch and NeMo RL again.
unset PYTHONDONTWRITEBYTECODE

stamp="$venv/.complete"
wanted=$(cat "$here/requirements.txt" "$root/pyproject.toml" | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Making $venv; it takes a few minutes." >&2
    rm -f "$stamp"
    python=$(sh "$root/scripts/find_python.sh" "${PYTHON:-}")
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --compile \
        -r "$here/requirements.txt" -e "$root[dev]"
    echo "$wanted" >"$stamp"
fi

# Nothing is fetched, and every worker runs in this interpreter.
export HF_HUB_OFFLINE=1 NEMO_RL_PY_EXECUTABLES_SYSTEM=1 RAY_worker_niceness=0

homes=$NEMO_RL_HOME
status=0
old_ifs=$IFS
IFS=:
for home in $homes; do
    IFS=$old_ifs
    echo "NeMo RL in $home" >&2
    (
        cd "$root"
        NEMO_RL_HOME=$home PYTHONPATH="$home:$here/site${PYTHONPATH:+:$PYTHONPATH}" \
            "$venv/bin/python" -m pytest tests/nemo_rl -rs "$@"
    ) || status=$?
    IFS=:
done
exit "$status"

#!/bin/sh
# Run the tests of this folder in an environment of their own, made on the first call.
#   VENV=.venv-megatron [PYTHON=python3.12] [MEGATRON_SOURCES=DIR:DIR] run.sh [pytest arguments]
# MEGATRON_SOURCES: folders that hold `megatron/`, of Megatron-LM and Megatron Bridge
# checkouts, to be tested in place of the released packages.
set -eu

VENV=${VENV:-.venv-megatron}
STAMP=$VENV/.complete
HERE=$(dirname "$0")
unset PYTHONDONTWRITEBYTECODE # else every process would compile torch again

if [ ! -e "$STAMP" ] || [ "$HERE/run.sh" -nt "$STAMP" ] || [ "$HERE/requirements.txt" -nt "$STAMP" ]; then
    python=$(sh scripts/find_python.sh "${PYTHON:-}")
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$VENV"
    echo '*' >"$VENV/.gitignore"
    pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --compile "$@"; }
    pip -c constraints.txt -e . -r "$HERE/requirements.txt"
    # Megatron asks for Python 3.12 and for packages that exist for GPUs only. What the
    # tests use of it runs on 3.11 and without them; tests/megatron/cpu_stack.py says how.
    pip --no-deps --ignore-requires-python megatron-core==0.19.2 megatron-bridge==0.6.0
    touch "$STAMP"
fi

PYTHONPATH=${MEGATRON_SOURCES:-}${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec "$VENV/bin/python" -W ignore -m pytest tests/megatron "$@"

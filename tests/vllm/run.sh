#!/bin/sh
# Run the tests of this folder in an environment of their own, made on the first call.
#   VENV=.venv-vllm [PYTHON=python3.12] [NEMO_RL_HOME=DIR] run.sh [pytest arguments]
# NEMO_RL_HOME: a checkout of NeMo RL; without it its worker is not tested.
# It takes 6 GB: a CPU build of vLLM over the usual build of torch.
set -eu

VENV=${VENV:-.venv-vllm}
STAMP=$VENV/.complete
HERE=$(dirname "$0")
unset PYTHONDONTWRITEBYTECODE # else every engine process would compile torch again

if [ ! -e "$STAMP" ] || [ "$HERE/run.sh" -nt "$STAMP" ] || [ "$HERE/requirements.txt" -nt "$STAMP" ]; then
    python=$(sh scripts/find_python.sh "${PYTHON:-python3.12 python3.13 python3.11}")
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$VENV"
    echo '*' >"$VENV/.gitignore"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check uv
    # vLLM's CPU build asks for a CPU build of torch, which its own index has only for
    # some Pythons; it runs over the usual one as well.
    grep '^torch==' "$HERE/requirements.txt" >"$VENV/override.txt"
    uv() { "$VENV/bin/python" -m uv pip "$@" --quiet --python "$VENV/bin/python"; }
    uv install --compile-bytecode --override "$VENV/override.txt" -e . -r "$HERE/requirements.txt"
    # Not needed, and their builds do not fit that torch.
    uv uninstall torchvision torchaudio torchcodec
    touch "$STAMP"
fi

PYTHONPATH=${NEMO_RL_HOME:-}${PYTHONPATH:+:$PYTHONPATH}
NEMO_RL_PY_EXECUTABLES_SYSTEM=1
export PYTHONPATH NEMO_RL_PY_EXECUTABLES_SYSTEM
exec "$VENV/bin/python" -m pytest tests/vllm "$@"

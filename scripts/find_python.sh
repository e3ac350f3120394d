#!/bin/sh
# Print a Python that this package runs on, or say on stderr why there is none.
#   find_python.sh [PYTHON]     PYTHON: use this one and no other
set -u

# A name on PATH proves nothing: version managers leave names that do not run, and
# some distributions ship venv apart. So each candidate has to say that it fits.
CHECK='
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("cannot create environments: the venv package of the distribution is missing")
'

refused=""
for candidate in ${1:-python3 python3.13 python3.12 python3.11}; do
    if ! command -v "$candidate" >/dev/null 2>&1; then
        refused="$refused
  $candidate: not found"
    elif reason=$("$candidate" -c "$CHECK" 2>&1); then
        echo "$candidate"
        exit 0
    else
        refused="$refused
  $candidate: $(printf '%s' "$reason" | head -n 1)"
    fi
done

echo "No suitable Python: 3.11, 3.12 or 3.13 with venv is needed. Tried:$refused
Install one, or name it: make venv PYTHON=/path/to/python3" >&2
exit 1

# Sourced by run.sh and test.sh: makes the virtual environment $1 from the pins in $2, unless it already holds them.
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "error: $("$PYTHON" --version) is too old; Python 3.10 or newer is needed (set PYTHON=/path/to/python3.1x)" >&2; exit 2; }
stamp="$1/.pins"
if ! cmp -s <(cat requirements.txt "$2") "$stamp"; then
  echo "setting up $1 from $2 (once)"
  "$PYTHON" -m venv "$1"
  "$1/bin/python" -m pip install -q --upgrade pip
  # torch first and by itself, so that a build already on this machine (CPU or CUDA) satisfies the other packages' needs
  "$1/bin/python" -m pip install -q "$(grep '^torch==' requirements.txt)"
  "$1/bin/python" -m pip install -q -r "$2"
  cat requirements.txt "$2" > "$stamp"
fi

#!/usr/bin/env bash
# Sets up what the tests need (once) and runs them:  bash test.sh [pytest flags]
set -euo pipefail
cd "$(dirname "$0")"
. ./setup.sh .venv-test requirements-test.txt
.venv-test/bin/ruff check .
exec .venv-test/bin/python -m pytest -n auto "$@"

#!/usr/bin/env bash
# Sets up what training needs (once) and runs a program in it:  bash run.sh [train.py|eval.py|...] [flags]
# With no program: train.py, which without flags is the main job.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup.sh .venv requirements.txt
case "${1--}" in -*) set -- train.py "$@" ;; esac
exec .venv/bin/python "$@"

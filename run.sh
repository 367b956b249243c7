#!/usr/bin/env bash
# Sets up what training needs (once) and runs a program in it:  bash run.sh [train.py|eval.py|... flags]
# With no argument: the main job, `python train.py`.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup.sh .venv requirements.txt
[ $# -gt 0 ] || set -- train.py
exec .venv/bin/python "$@"

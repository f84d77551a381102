#!/usr/bin/env bash
# Installs everything into .venv and aligns a small model, on a laptop's CPU in
# a few minutes, without any download besides Python packages.
#
#   launch/quickstart.sh [WORKDIR] [--config.key=value ...]
#
# WORKDIR is runs/quickstart by default. Running it again with the same WORKDIR
# continues a run that was interrupted.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 0
fi
workdir=''
if [[ $# -gt 0 && "$1" != -* ]]; then
  # Relative to where the command was given, not to the repository.
  workdir="$1"
  [[ "${workdir}" == /* ]] || workdir="${PWD}/${workdir}"
  shift
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh
source launch/environment.sh
environment_ready ''

exec "${ENVIRONMENT_PYTHON}" launch/train.py \
  --config=configs/quickstart.py \
  --workdir="${workdir:-runs/quickstart}" "$@"

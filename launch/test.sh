#!/usr/bin/env bash
# Installs everything into .venv and runs the tests.
#
#   launch/test.sh [PYTEST ARGUMENT ...]
#
#   launch/test.sh                            the whole suite
#   launch/test.sh tests/algorithms -x        a part, to the first failure
#   launch/test.sh -m slow                    what is left out by default
#   RLHF_JAX_EXTRAS=test,parity launch/test.sh
#     also installs torch and compares with it; without it those tests skip
#
# RLHF_JAX_SHARED names the folder with shared test data (default: ../shared
# beside the repository); tests that need it skip where it is absent.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh
source launch/environment.sh
environment_ready "${RLHF_JAX_EXTRAS:-test}"

# Two workers; a file stays with one, since its tests share what is compiled.
exec "${ENVIRONMENT_PYTHON}" -m pytest -q -n 2 --dist loadfile "$@"

# Sourced by quickstart.sh, test.sh and .ci/run; not a command of its own.
#
# environment_ready [EXTRAS] leaves a virtual environment in .venv of the
# repository root with the package (editable) and the extras (comma-separated
# names of setup.cfg) installed, and the variable ENVIRONMENT_PYTHON set to its
# interpreter. It installs only when the requirements, the extras or the
# interpreter changed since the last time; extras that are there stay.
#
# PYTHON names the interpreter to make the environment with.
# shellcheck shell=bash

environment_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

environment_fail() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

# Succeeds if $1 runs and is Python 3.11 or newer.
environment_python_works() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the first interpreter that will do; lists what it found otherwise.
environment_find_python() {
  local name found=''
  if [[ -n "${PYTHON:-}" ]]; then
    if ! environment_python_works "${PYTHON}"; then
      environment_fail \
        "PYTHON=${PYTHON} is $("${PYTHON}" --version 2>&1 | head -n 1);" \
        "expected Python 3.11 or newer. Set PYTHON to one, or unset it."
    fi
    printf '%s\n' "${PYTHON}"
    return
  fi
  for name in python3 python3.13 python3.12 python3.11 python; do
    if command -v "${name}" >/dev/null; then
      if environment_python_works "${name}"; then
        printf '%s\n' "${name}"
        return
      fi
      found+=" ${name} ($("${name}" --version 2>&1 | head -n 1));"
    fi
  done
  environment_fail \
    "got:${found:- no python on PATH;} expected Python 3.11 or newer." \
    "Install one (apt-get install python3.11 python3.11-venv; brew install" \
    "python@3.12; or https://www.python.org/downloads), or set PYTHON to it."
}

# Prints a hash of all that decides what gets installed.
environment_hash() {
  (
    cd "${environment_root}" &&
      "${ENVIRONMENT_PYTHON}" - requirements.txt setup.cfg pyproject.toml <<'EOF'
import hashlib
import pathlib
import sys

digest = hashlib.sha256(f'{sys.version} {pathlib.Path.cwd()}'.encode())
for name in sys.argv[1:]:
  digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
EOF
  )
}

environment_ready() {
  local venv="${environment_root}/.venv"
  local stamp="${venv}/rlhf_jax_installed"
  local python hash installed_hash='' installed_extras='' extra missing=''
  local extras="${1:-}"
  ENVIRONMENT_PYTHON="${venv}/bin/python"

  if ! environment_python_works "${ENVIRONMENT_PYTHON}"; then
    python="$(environment_find_python)" || exit 1
    printf 'Making a virtual environment in %s with %s.\n' \
      "${venv}" "$("${python}" --version)"
    # --clear: what is there does not run, or is of an older Python.
    "${python}" -m venv --clear "${venv}" || environment_fail \
      "${python} -m venv failed (see above). On Debian and Ubuntu install" \
      "the package python3-venv, then run this again."
  fi

  hash="$(environment_hash)" || exit 1
  if [[ -f "${stamp}" ]]; then
    { read -r installed_hash && read -r installed_extras; } <"${stamp}" || true
  fi
  for extra in ${extras//,/ }; do
    [[ ",${installed_extras}," == *",${extra},"* ]] || missing+=",${extra}"
  done
  if [[ "${installed_hash}" == "${hash}" && -z "${missing}" ]]; then
    return
  fi

  # Gone while installing, so that an interrupted installation is done again.
  rm -f "${stamp}"
  extras="${installed_extras}${missing}"
  extras="${extras#,}"
  printf 'Installing rlhf_jax%s into %s (minutes the first time).\n' \
    "${extras:+[${extras}]}" "${venv}"
  # A person waiting wants to see what happens; a log does not need it.
  local verbosity=--progress-bar=on
  [[ -t 1 ]] || verbosity=--quiet
  "${ENVIRONMENT_PYTHON}" -m pip install --disable-pip-version-check \
    "${verbosity}" --editable "${environment_root}${extras:+[${extras}]}" ||
    environment_fail \
      "pip failed (see above); nothing was recorded, so run this again when" \
      "the cause is gone. Deleting ${venv} starts from nothing."
  printf '%s\n%s\n' "${hash}" "${extras}" >"${stamp}"
}

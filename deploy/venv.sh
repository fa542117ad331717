# Sourced by deploy/demo and tests/run: makes .venv with this package, once for each pyproject.toml.
# POSIX sh; needs nothing but Python 3.11 or newer with its venv module.

find_python() {
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "lora-sidecar needs Python 3.11, 3.12 or 3.13 with its venv module, and none was found." >&2
    echo "On Debian or Ubuntu: apt-get install python3-venv. Or name one: PYTHON=/path/to/python3 $0" >&2
    return 1
}

# make_venv REQUIREMENT STAMP: installs `pip install -e REQUIREMENT` unless that was done for this pyproject.toml.
make_venv() {
    stamp=".venv/.installed-$2"
    if [ -f "$stamp" ] && cmp -s pyproject.toml "$stamp" && .venv/bin/python -c '' 2>/dev/null; then
        return 0
    fi
    if ! .venv/bin/python -c '' 2>/dev/null; then
        python=$(find_python) || exit 1
        echo "making .venv with $("$python" --version)" >&2
        "$python" -m venv --clear .venv
    fi
    echo "installing $1 into .venv" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e "$1" 2>.venv/pip.log || {
        cat .venv/pip.log >&2
        echo "pip could not install $1 (see above)." >&2
        exit 1
    }
    cp pyproject.toml "$stamp"
}

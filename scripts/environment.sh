# Shared by quickstart and test: find a Python, make `.venv`, install once. Sourced, not run.
#
# An install is stamped with a hash of what decides its result (pyproject.toml, the Python version,
# the list of packages); while the stamp holds, nothing is installed again.

fail() {
    echo "error: $*" >&2
    exit 1
}

# Print the first Python that is new enough.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "expected Python 3.11 or newer, got $(python3 --version 2>&1 || true)." \
        "Install python3.11 (or newer) so that it is on PATH."
}

make_venv() {
    if [ ! -x .venv/bin/python ]; then
        local python
        python=$(find_python)
        echo "Making .venv with $("$python" --version)"
        "$python" -m venv .venv || fail "could not make .venv. On Debian: apt install python3-venv."
    fi
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "expected Python 3.11 or newer in .venv, got $(.venv/bin/python --version)." \
            "Remove .venv and run again."
}

# install_once NAME ARGUMENTS... : run `pip install` for each argument list, split at `--then`.
install_once() {
    local stamp=".venv/$1.stamp" name="$1" key
    shift
    key=$({
        .venv/bin/python --version
        cat pyproject.toml
        echo "$@"
    } | .venv/bin/python -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
        return
    fi
    echo "Installing ($name); the first time takes a few minutes"
    local arguments=()
    for argument in "$@" --then; do
        if [ "$argument" = "--then" ]; then
            .venv/bin/python -m pip install --quiet --disable-pip-version-check "${arguments[@]}" \
                2> >(grep -v '^WARNING' >&2) ||
                fail "pip could not install: ${arguments[*]}"
            arguments=()
        else
            arguments+=("$argument")
        fi
    done
    echo "$key" >"$stamp"
}

# Functions for quickstart and test: find Python, make an environment, install once, choose tests.
# Sourced, not run.
#
# The environment is the folder `$venv`. Its Python must be at least 3.`$oldest`.
# A stamp of an install is a hash of its inputs (pyproject.toml, the Python version, the list of
# packages); while the stamp matches, nothing is installed again.

venv=.venv
oldest=11

fail() {
    echo "error: $*" >&2
    exit 1
}

# not_tested WHAT WHY: say that tests were left out. This is an error in continuous integration.
not_tested() {
    [ "${CI:-}" != true ] || fail "expected to test with $1, got nothing to test: $2." \
        "Mend the environment; outside CI (without CI=true) this is only a note."
    echo "Not tested with $1: $2."
}

# Print the first Python that is new enough. Try those of pyenv last. Print nothing if none is.
find_python() {
    local name
    for name in python3 python3.{13,12,11,14} python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
        if command -v "$name" >/dev/null 2>&1 && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
}

is_new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < (3, $oldest))" 2>/dev/null
}

make_venv() {
    if [ ! -x "$venv/bin/python" ]; then
        local python
        python=$(find_python)
        [ -n "$python" ] ||
            fail "expected Python 3.$oldest or newer, got $(python3 --version 2>&1 || true)." \
                "Install python3.$oldest (or newer) so that it is on PATH."
        echo "Making $venv with $("$python" --version)"
        "$python" -m venv "$venv" || fail "could not make $venv. On Debian: apt install python3-venv."
    fi
    is_new_enough "$venv/bin/python" ||
        fail "expected Python 3.$oldest or newer in $venv, got $("$venv/bin/python" --version)." \
            "Remove $venv and run again."
}

# install_once NAME ARGUMENTS... : run `pip install` for each argument list, split at `--then`.
install_once() {
    local stamp="$venv/$1.stamp" name="$1" key
    shift
    key=$({
        "$venv/bin/python" --version
        cat pyproject.toml
        echo "$@"
    } | "$venv/bin/python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
        return
    fi
    echo "Installing ($name); the first time takes a few minutes"
    local arguments=()
    for argument in "$@" --then; do
        if [ "$argument" = "--then" ]; then
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${arguments[@]}" \
                2> >(grep -v '^WARNING' >&2) ||
                fail "pip could not install: ${arguments[*]}"
            arguments=()
        else
            arguments+=("$argument")
        fi
    done
    echo "$key" >"$stamp"
}

# Sourced by scripts/demo and scripts/test. Leaves a synced environment and its Python in $python.
# Needs only git and some Python: uv comes from PATH or from a private environment in .cache/uv.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root" || exit 1
tools="$root/.cache/uv"

say() { printf '%s\n' "$*" >&2; }

is_recent_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# The uv on PATH counts only when it is new enough for [tool.uv] required-version.
is_recent_uv() {
    case $("$1" --version 2>/dev/null) in
        'uv 0.'[0-7].*) return 1 ;;
        'uv '*) return 0 ;;
        *) return 1 ;;
    esac
}

find_python() {
    for candidate in python3.13 python3.12 python3.14 python3 python \
        "$HOME"/.pyenv/versions/3.13*/bin/python "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
        if is_recent_python "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

# Any Python will do to fetch uv, also one that is too old for the project.
install_uv() {
    for candidate in "${UV_PYTHON:-python3}" python3 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        rm -rf "$tools"
        say "uv is not on PATH: installing a private copy with $candidate into .cache/uv"
        if "$candidate" -m venv "$tools" >/dev/null 2>&1 &&
            "$tools/bin/python" -m pip install --quiet uv; then
            return 0
        fi
        # Some distributions ship Python without venv or ensurepip.
        rm -rf "$tools"
        if "$candidate" -m pip install --quiet --target "$tools" uv; then
            return 0
        fi
    done
    say "cannot install uv: no Python here has a working venv or pip."
    say "Install uv by hand, put it on PATH and run this command again."
    return 1
}

find_uv() {
    for candidate in uv "$tools/bin/uv"; do
        if is_recent_uv "$candidate"; then
            uv=$candidate
            return 0
        fi
    done
    install_uv && uv="$tools/bin/uv"
}

sync_environment() {
    [ -x .venv/bin/python ] || say "Creating .venv; the first time this downloads PyTorch."
    if ! "$uv" sync --quiet; then
        say "uv sync failed; trying once more."
        "$uv" sync || return 1
    fi
    python="$root/.venv/bin/python"
}

if [ -z "${UV_PYTHON:-}" ]; then
    # Without a Python of its own to use, uv downloads the one that .python-version names.
    UV_PYTHON=$(find_python) && export UV_PYTHON || unset UV_PYTHON
fi
find_uv && sync_environment || exit 1

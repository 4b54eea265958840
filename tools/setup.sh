#!/usr/bin/env bash
# Make .venv and install what is pinned: tools/setup.sh core|test|lint
#
# Nothing outside the checkout is written. What is missing is said in one line on stderr, exit 2.
# Done work is remembered by stamps that name the content of pyproject.toml, constraints.txt and
# setup.py, so a second call does nothing. lint holds all of test, and test all of core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly OLDEST="3.11" NEED_GB=6 HEARTBEAT_S=5
readonly VENV=.venv LOG=.venv/setup.log
readonly NAMES="python3 python3.12 python3.11 python3.13 python3.14 python"

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

say() { printf '[%3ds] %s\n' "$SECONDS" "$1"; }

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a program; name a Python $OLDEST or newer"
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is older than Python $OLDEST; name a newer one"
        echo "$PYTHON"
        return
    fi
    local name
    for name in $NAMES; do
        if is_new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    fail "no Python $OLDEST or newer among $NAMES; install one, or name it: make run PYTHON=/path/to/python3"
}

check_modules() {
    "$1" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        fail "$1 has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"
}

# torch.compile on a CPU compiles C++ that includes Python.h and uses OpenMP: try just that.
check_compiler() {
    local include sample
    command -v "$CXX" >/dev/null ||
        fail "no C++ compiler: torch.compile needs g++ or clang++ (Debian, Ubuntu: apt install g++), or name one: CXX=..."
    include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] ||
        fail "$include/Python.h is missing; install Python's headers (Debian, Ubuntu: apt install python3-dev)"
    sample=$'#include <cmath>\n#include <omp.h>\nint main() { return omp_get_num_procs() < 1; }'
    [ "$(uname)" = Darwin ] || "$CXX" -x c++ -fopenmp -fsyntax-only - <<<"$sample" 2>/dev/null ||
        fail "$CXX cannot compile C++ with OpenMP; install its standard library and OpenMP headers (g++, or libomp-dev for clang++)"
}

check_disk() {
    local free_kb
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kb" -ge $((NEED_GB * 1024 * 1024)) ] ||
        fail "only $((free_kb / 1024 / 1024)) GB free here, $NEED_GB GB are needed; free some, or clone to a larger disk"
}

# What pip is at, from its log.
latest() {
    local line
    line=$(grep -E '^ *(Collecting|Downloading|Processing|Building|Installing) ' "$LOG" | tail -n 1)
    case "$line" in
        *Installing*) echo "unpacking, $(du -sm "$VENV" | cut -f 1) MB in place" ;;
        *) sed -E 's/^ *//; s/ \(from .*//' <<<"${line:-working}" | cut -c 1-70 ;;
    esac
}

# Run a command into the log; while it is at it, say now and then what it does.
with_heartbeat() {
    local pid next=$((SECONDS + HEARTBEAT_S)) status=0
    "$@" >>"$LOG" 2>&1 &
    pid=$!
    trap "kill $pid 2>/dev/null || true" EXIT
    trap 'exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if [ "$SECONDS" -ge "$next" ]; then
            next=$((SECONDS + HEARTBEAT_S))
            say "  ... $(latest)"
        fi
    done
    wait "$pid" || status=$?
    trap - EXIT INT TERM
    return "$status"
}

pip_install() {
    with_heartbeat "$VENV/bin/python" -m pip install --progress-bar off --no-input --no-compile \
        --disable-pip-version-check --constraint constraints.txt "$@"
}

explain() {
    local unreachable='NewConnectionError|NameResolutionError|Failed to establish|Network is unreachable|Read timed out|ConnectTimeout|ProxyError'
    if grep -Eq 'No space left on device' "$LOG"; then
        fail "the disk is full; $NEED_GB GB are needed. Free some, then repeat the command"
    elif grep -Eq "$unreachable" "$LOG"; then
        fail "the package index cannot be reached; check the network (or PIP_INDEX_URL), then repeat the command"
    fi
    fail "$1: $(grep -i 'error' "$LOG" | tail -n 1 | cut -c 1-200) (all of it: $LOG)"
}

make_venv() {
    local python=$1
    if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        is_new_enough "$VENV/bin/python" || fail "$VENV has a Python older than $OLDEST; run: make clean"
        return
    fi
    say "making $VENV with $("$python" --version 2>&1)"
    mkdir -p "$VENV" && : >"$LOG"
    with_heartbeat "$python" -m venv "$VENV" || explain "cannot make $VENV"
}

main() {
    local set=${1:-core} extras held sum python
    case "$set" in
        core) extras="" held="core" ;;
        test) extras="[test]" held="core test" ;;
        lint) extras="[test,dev]" held="core test lint" ;;
        *) fail "unknown set '$set'; choose core, test or lint" ;;
    esac
    sum=$(cat pyproject.toml constraints.txt setup.py | cksum | tr ' ' '-')
    [ -f "$VENV/.installed-$set-$sum" ] && exit 0

    if [ -z "${CXX:-}" ]; then
        CXX=g++
        command -v g++ >/dev/null || CXX=clang++
    fi
    python=$(find_python)
    check_modules "$python"
    check_compiler "$python"
    check_disk
    export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$PWD/.cache/pip}"
    make_venv "$python"
    : >"$LOG"
    # The build backend first: small, so an unreachable index shows within seconds.
    say "installing the $set set"
    pip_install --retries 1 --timeout 20 setuptools || explain "cannot install setuptools"
    pip_install --no-build-isolation --editable ".$extras" || explain "cannot install kernelwright$extras"
    for set in $held; do
        rm -f "$VENV/.installed-$set-"*
        touch "$VENV/.installed-$set-$sum"
    done
    say "installed"
}

main "$@"

#!/bin/sh
# Runs what runs in threads under ThreadSanitizer: fuzz/threads.sh FILE...
# The core is built with it (gcc's libtsan), and called by four threads at once on the same
# JPEGs. First a race is made on purpose, to see that it would be found.
set -eu
python=$(command -v "${PYTHON:-python3}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
here=$(cd "$(dirname "$0")" && pwd)
cp -r "$here/../pcrshard" "$work/pcrshard"
cd "$work"
rm -f pcrshard/native/*.so
export CC=gcc CFLAGS="-O1 -g -fsanitize=thread" LDFLAGS="-fsanitize=thread"
PYTHONPATH=$work "$python" pcrshard/native/build_native.py > build.log
run() {
    LD_PRELOAD=$(gcc -print-file-name=libtsan.so) OPENBLAS_NUM_THREADS=1 PYTHONPATH=$work \
        TSAN_OPTIONS="halt_on_error=1 exitcode=66" "$python" "$here/threads.py" "$@"
}
status=0
run --race "$@" > race.log 2>&1 || status=$?
if [ "$status" -ne 66 ] || ! grep -q "data race" race.log; then
    tail -n 20 race.log
    echo "threads.sh: expected a race to be found, got status $status" >&2
    exit 1
fi
run "$@"

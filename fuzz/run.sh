#!/bin/sh
# Fuzzes the native core under ASan and UBSan: fuzz/run.sh SECONDS FOLDER...
# FOLDERs hold JPEG files to start from; findings and the corpus stay in fuzz/found, or $FUZZ_WORK.
# FUZZ_TARGET=fuzz_tables, without folders, fuzzes tables of pieces and patches of weights instead.
set -eu
seconds=$1
shift
cd "$(dirname "$0")"
work=${FUZZ_WORK:-found}
target=${FUZZ_TARGET:-fuzz_native}
mkdir -p "$work/corpus" "$work/findings"
[ $# -eq 0 ] || python3 make_corpus.py "$work/corpus" "$@"
# shellcheck disable=SC2086
${CC:-clang} -std=c11 ${CFLAGS:--O1 -g} \
    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    -I../pcrshard/native/src -o "$work/$target" "$target.c" \
    ../pcrshard/native/src/*.c -lm -pthread
# A busy machine needs a longer FUZZ_TIMEOUT, in seconds by the clock.
exec nice "$work/$target" -max_total_time="$seconds" -timeout="${FUZZ_TIMEOUT:-10}" \
    -rss_limit_mb=2048 -max_len=14000 -artifact_prefix="$work/findings/" -print_final_stats=1 \
    "$work/corpus"

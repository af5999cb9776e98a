#!/bin/sh
# Runs the native core where integers, pointers, bytes or kernels differ: fuzz/portable.sh FILE...
# All give the same pixels: this machine, 32 bits, and under qemu big-endian s390x and ARM, with
# vector kernels. In Debian: qemu-user-static libc6-dev-i386 lib32gcc-12-dev and
# gcc-{s390x,aarch64}-linux-gnu libc6-dev-{s390x,arm64}-cross
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
here=$(dirname "$0")
build() {
    name=$1
    shift
    "$@" -std=c11 -O1 -g -I"$here/../pcrshard/native/src" -o "$work/$name" "$here/replay.c" \
        "$here/fuzz_native.c" "$here"/../pcrshard/native/src/*.c -lm -pthread
}
build here gcc -fsanitize=undefined,address -fno-sanitize-recover=all
build bits32 gcc -m32
build s390x s390x-linux-gnu-gcc -static
build aarch64 aarch64-linux-gnu-gcc -static
"$work/here" "$@" > "$work/here.txt"
"$work/bits32" "$@" > "$work/bits32.txt"
qemu-s390x-static "$work/s390x" "$@" > "$work/s390x.txt"
qemu-aarch64-static "$work/aarch64" "$@" > "$work/aarch64.txt"
cmp "$work/here.txt" "$work/bits32.txt"
cmp "$work/here.txt" "$work/s390x.txt"
cmp "$work/here.txt" "$work/aarch64.txt"
echo "$# files give the same on this machine, with 32 bits, on s390x and on ARM"

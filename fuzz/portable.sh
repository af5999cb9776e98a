#!/bin/sh
# Runs the native core where integers, pointers or their bytes differ: fuzz/portable.sh FILE...
# Each must give the same pixels: this machine, 32 bits, and big-endian s390x under qemu. In Debian:
# gcc-s390x-linux-gnu libc6-dev-s390x-cross qemu-user-static libc6-dev-i386 lib32gcc-12-dev
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
"$work/here" "$@" > "$work/here.txt"
"$work/bits32" "$@" > "$work/bits32.txt"
qemu-s390x-static "$work/s390x" "$@" > "$work/s390x.txt"
cmp "$work/here.txt" "$work/bits32.txt"
cmp "$work/here.txt" "$work/s390x.txt"
echo "$# files give the same on this machine, with 32 bits and on s390x"

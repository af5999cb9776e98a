/* The vector kernels' instructions. They are written in AVX2's intrinsics, which neon.h gives a
 * meaning on ARM. Here: whether this machine can run them, and BEGIN and END, which compile what is
 * between them for them, whatever the file's target. */
#ifndef PCR_AVX2_H
#define PCR_AVX2_H

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PCR_HAVE_VECTORS 1
#define PCR_VECTORS "avx2"
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>

enum { PCR_KNOWN = 1, PCR_AVX2 = 2, PCR_VPCLMULQDQ = 4 };

/* By the processor itself: not every compiler has __builtin_cpu_supports in shared libraries. */
static inline int pcr_ask_processor(void) {
    /* Bits of CPUID's answers, in the order PCLMUL, SSE4.2, POPCNT, OSXSAVE and AVX; BMI1, AVX2 and
     * BMI2; LZCNT. */
    const unsigned first = 1u << 1 | 1u << 20 | 1u << 23 | 1u << 27 | 1u << 28;
    const unsigned seventh = 1u << 3 | 1u << 5 | 1u << 8, extended = 1u << 5;
    const unsigned saved = 6; /* the system keeps the registers of SSE and AVX */
    unsigned a, b, c = 0, d, b7 = 0, c7 = 0, kept;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return PCR_KNOWN;
    __asm__("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    if ((kept & saved) != saved) return PCR_KNOWN;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d) || (b7 & seventh) != seventh) return PCR_KNOWN;
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !(c & extended)) return PCR_KNOWN;
    return PCR_KNOWN | PCR_AVX2 | (c7 >> 10 & 1 ? PCR_VPCLMULQDQ : 0);
}

/* Asked once, because a virtual machine takes microseconds to answer. */
static inline int pcr_processor(void) {
    static _Atomic int answer;
    if (!answer) answer = pcr_ask_processor();
    return answer;
}

static inline bool pcr_have_vectors(void) { return pcr_processor() & PCR_AVX2; }
static inline bool pcr_have_crc32c(void) { return pcr_have_vectors(); }

#define PCR_PRAGMA(x) _Pragma(#x)
#ifdef __clang__
#define PCR_AVX2_BEGIN \
    PCR_PRAGMA(clang attribute push( \
        __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,pclmul,crc32"))), apply_to = function))
#define PCR_AVX2_END PCR_PRAGMA(clang attribute pop)
#else
#define PCR_AVX2_BEGIN \
    PCR_PRAGMA(GCC push_options) PCR_PRAGMA(GCC target("avx2,bmi,bmi2,lzcnt,popcnt,pclmul,crc32"))
#define PCR_AVX2_END PCR_PRAGMA(GCC pop_options)
#endif
#elif defined(__aarch64__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define PCR_HAVE_VECTORS 1
#define PCR_VECTORS "neon"
#include <stdbool.h>

#include "neon.h"

static inline bool pcr_have_vectors(void) { return true; }

/* CRC32 and PMULL came with ARMv8.1; every server has them, but not every small board. */
#if defined(__linux__)
#include <sys/auxv.h>
static inline bool pcr_have_crc32c(void) {
    const unsigned long needed = HWCAP_CRC32 | HWCAP_PMULL;
    return (getauxval(AT_HWCAP) & needed) == needed;
}
#elif defined(__APPLE__)
static inline bool pcr_have_crc32c(void) { return true; }
#else
static inline bool pcr_have_crc32c(void) { return false; }
#endif

#define PCR_AVX2_BEGIN
#define PCR_AVX2_END
#else
#define PCR_HAVE_VECTORS 0
#endif

#endif

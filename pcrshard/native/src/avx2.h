/* Whether this machine has AVX2 + BMI2 + PCLMULQDQ, and BEGIN and END, which compile what is
 * between them for it, whatever the file's target. */
#ifndef PCR_AVX2_H
#define PCR_AVX2_H

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PCR_HAVE_AVX2 1
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#ifndef bit_ABM
#define bit_ABM bit_LZCNT
#endif

/* clang 14 cannot ask for lzcnt by name. */
static inline bool pcr_have_avx2(void) {
    unsigned a, b, c = 0, d;
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !(c & bit_ABM)) return false;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("pclmul");
}

#define PCR_PRAGMA(x) _Pragma(#x)
#ifdef __clang__
#define PCR_AVX2_BEGIN \
    PCR_PRAGMA(clang attribute push( \
        __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,pclmul"))), apply_to = function))
#define PCR_AVX2_END PCR_PRAGMA(clang attribute pop)
#else
#define PCR_AVX2_BEGIN \
    PCR_PRAGMA(GCC push_options) PCR_PRAGMA(GCC target("avx2,bmi,bmi2,lzcnt,popcnt,pclmul"))
#define PCR_AVX2_END PCR_PRAGMA(GCC pop_options)
#endif
#else
#define PCR_HAVE_AVX2 0
#endif

#endif

/* Compiles the functions between BEGIN and END for AVX2 + BMI2 + PCLMULQDQ, whatever the file's target is. */
#ifndef PCR_AVX2_H
#define PCR_AVX2_H

#include <immintrin.h>

#define PCR_PRAGMA(x) _Pragma(#x)
#ifdef __clang__
#define PCR_AVX2_BEGIN \
    PCR_PRAGMA(clang attribute push(__attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,pclmul"))), apply_to = function))
#define PCR_AVX2_END PCR_PRAGMA(clang attribute pop)
#else
#define PCR_AVX2_BEGIN PCR_PRAGMA(GCC push_options) PCR_PRAGMA(GCC target("avx2,bmi,bmi2,lzcnt,popcnt,pclmul"))
#define PCR_AVX2_END PCR_PRAGMA(GCC pop_options)
#endif

#endif

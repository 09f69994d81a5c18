/* Vectors of float32 for kernels that are written once for AVX-512 and AVX2.
 *
 * VECTORS says whether there are any. LANES numbers are in a vector. */
#ifndef HYPERSLAB_VECTORS_H
#define HYPERSLAB_VECTORS_H

#include "rows.h"

#if WIDE
#define VECTORS 1
#define WITH(operation) _mm512_##operation##_ps
enum { LANES = 16 };
typedef __m512 vector;
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VECTORS 1
#define WITH(operation) _mm256_##operation##_ps
enum { LANES = 8 };
typedef __m256 vector;
#else
#define VECTORS 0
#endif

#if VECTORS

INLINE vector zero(void) { return WITH(setzero)(); }
INLINE vector load(const float *from) { return WITH(load)(from); }
INLINE void store(float *to, vector v) { WITH(store)(to, v); }
INLINE vector add(vector a, vector b) { return WITH(add)(a, b); }
INLINE vector subtract(vector a, vector b) { return WITH(sub)(a, b); }
INLINE vector scaled(vector a, float by) { return WITH(mul)(a, WITH(set1)(by)); }
INLINE vector add_products(vector sum, vector a, vector b) { return WITH(fmadd)(a, b, sum); }
INLINE vector add_product(vector sum, float a, vector b) { return WITH(fmadd)(WITH(set1)(a), b, sum); }

/* `count` numbers of float32 or bfloat16 from the first-th on; zeros after them. */
#if WIDE
INLINE vector some_of(const void *row, int64_t type, int64_t first, int64_t count)
{
    __mmask16 mask = (__mmask16)(count < LANES ? (1 << count) - 1 : 0xffff);
    if (type == FLOAT32)
        return _mm512_maskz_loadu_ps(mask, (const float *)row + first);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)row + first);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
#else
INLINE vector some_of(const void *row, int64_t type, int64_t first, int64_t count)
{
    float numbers[8] = {0};
    if (type == FLOAT32) {
        if (count >= LANES)
            return _mm256_loadu_ps((const float *)row + first);
        memcpy(numbers, (const float *)row + first, (size_t)(4 * count));
        return _mm256_loadu_ps(numbers);
    }
    uint16_t halves[8] = {0};
    memcpy(halves, (const uint16_t *)row + first, (size_t)(2 * (count < LANES ? count : LANES)));
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)halves));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
#endif

#endif

#endif

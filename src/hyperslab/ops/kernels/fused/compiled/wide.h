/* A step in registers: read, computed and written sixteen elements at a time, with their bits.
 *
 * The same as the plain loops beside their callers, which do what is left over: the end of a step,
 * and bits that begin within a byte. Each returns how many elements it did. */
#ifndef HYPERSLAB_WIDE_H
#define HYPERSLAB_WIDE_H

#include "rows.h"

enum { IDENTITY, RELU, LEAKY };
enum { EVERYWHERE, FROM_X, FROM_BITS };
enum { PLAIN, SCALED, COMBINED, SUMMED };

#if WIDE

INLINE __m512 load_wide(const void *source, int64_t type, int64_t i)
{
    if (type == FLOAT32)
        return _mm512_loadu_ps((const float *)source + i);
    __m256i halves = _mm256_loadu_si256((const void *)((const uint16_t *)source + i));
    if (type == FLOAT16)
        return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE __m256i halves_of(__m512 values, int64_t type)
{
    if (type == FLOAT16)
        return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
    __m512i word = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_add_epi32(word, half);
    __m512i quiet = _mm512_or_si512(word, _mm512_set1_epi32(0x400000));
    __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    __m512i chosen = _mm512_mask_mov_epi32(rounded, nan, quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
}

INLINE void store_wide(void *target, int64_t type, int64_t i, __m512 values, int past_caches)
{
    if (type == FLOAT32) {
        float *to = (float *)target + i;
        if (past_caches)
            _mm512_stream_ps(to, values);
        else
            _mm512_storeu_ps(to, values);
        return;
    }
    __m256i *to = (void *)((uint16_t *)target + i);
    if (past_caches)
        _mm256_stream_si256(to, halves_of(values, type));
    else
        _mm256_storeu_si256(to, halves_of(values, type));
}

INLINE int can_stream(const void *target, int64_t type, int64_t first)
{
    return ((uintptr_t)target + first * size_of[type]) % (16 * size_of[type]) == 0;
}

INLINE __mmask16 passes_wide(__m512 u, int activation)
{
    __m512 zero = _mm512_setzero_ps();
    return activation == RELU ? _mm512_cmp_ps_mask(u, zero, _CMP_NLE_UQ)
                              : _mm512_cmp_ps_mask(u, zero, _CMP_GT_OQ);
}

INLINE __m512 damped(__m512 values, __mmask16 passes, __m512 slope, int activation)
{
    if (activation == RELU)
        return _mm512_maskz_mov_ps(passes, values);
    return _mm512_mask_mul_ps(values, _knot_mask16(passes), values, slope);
}

INLINE __m512 normalised_wide(__m512 x, const float *m, const float *s, const float *t)
{
    __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(x, _mm512_loadu_ps(m)), _mm512_loadu_ps(s));
    return _mm512_add_ps(scaled, _mm512_loadu_ps(t));
}

/* target[first_y + i] (+)= activation((x[first + i] - m[i]) * s[i] + t[i]); bits[first + i]. */
INLINE int64_t activate_types(void *target, int64_t y_type, int64_t stream, int64_t first_y,
                              const void *x, int64_t x_type, int64_t first, const float *m,
                              const float *s, const float *t, int64_t n, float slope,
                              uint8_t *bits, int activation, int scaled, int add)
{
    if (bits && first % 8)
        return 0;
    int past_caches = stream && can_stream(target, y_type, first_y);
    __m512 factor = _mm512_set1_ps(slope);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 u = load_wide(x, x_type, first + i);
        if (scaled)
            u = normalised_wide(u, m + i, s + i, t + i);
        if (activation != IDENTITY) {
            __mmask16 passes = passes_wide(u, activation);
            if (bits) {
                uint16_t word = (uint16_t)passes;
                memcpy(bits + (first + i) / 8, &word, 2);
            }
            u = damped(u, passes, factor, activation);
        }
        if (add)
            u = _mm512_add_ps(_mm512_loadu_ps((float *)target + first_y + i), u);
        store_wide(target, y_type, first_y + i, u, past_caches);
    }
    return i;
}

/* The usual types are known to the compiler: one loop for each. */
#define BY_TYPES(x_type, y_type, CALL)                                                            \
    if (x_type == FLOAT32 && y_type == FLOAT32)                                                   \
        return CALL(FLOAT32, FLOAT32);                                                            \
    if (x_type == BFLOAT16 && y_type == FLOAT32)                                                  \
        return CALL(BFLOAT16, FLOAT32);                                                           \
    if (x_type == BFLOAT16 && y_type == BFLOAT16)                                                 \
        return CALL(BFLOAT16, BFLOAT16);                                                          \
    return CALL(x_type, y_type);

INLINE int64_t activate_wide(void *target, int64_t y_type, int64_t stream, int64_t first_y,
                             const void *x, int64_t x_type, int64_t first, const float *m,
                             const float *s, const float *t, int64_t n, float slope, uint8_t *bits,
                             int activation, int scaled, int add)
{
#define CALL(of_x, of_y)                                                                          \
    activate_types(target, of_y, stream, first_y, x, of_x, first, m, s, t, n, slope, bits,        \
                   activation, scaled, add)
    BY_TYPES(x_type, y_type, CALL)
#undef CALL
}

/* The gradient of a step and what becomes of it. */
typedef struct {
    void *target;
    int64_t y_type, stream, first_y;
    const void *x;
    int64_t x_type, first_x;
    const float *g;
    const int32_t *winner; /* or NULL */
    int32_t number;
    const float *m, *s, *t, *b, *c;
    double *sum, *product;
    const uint8_t *bits;
    int64_t first; /* bit */
    float slope;
    int activation;
} gradient_step;

INLINE void add_wide(double *sum, double *product, __m256 d, __m256 x)
{
    __m512d wide_d = _mm512_cvtps_pd(d), wide_x = _mm512_cvtps_pd(x);
    _mm512_storeu_pd(sum, _mm512_add_pd(_mm512_loadu_pd(sum), wide_d));
    _mm512_storeu_pd(product,
                     _mm512_add_pd(_mm512_loadu_pd(product), _mm512_mul_pd(wide_d, wide_x)));
}

INLINE int64_t gradient_types(const gradient_step *step, int64_t n, int known, int affine,
                              int activation, int64_t x_type, int64_t y_type)
{
    const gradient_step p = *step; /* so that it is known not to change */
    if (known == FROM_BITS && p.first % 8)
        return 0;
    int past_caches = p.stream && can_stream(p.target, y_type, p.first_y);
    __m512 slope = _mm512_set1_ps(p.slope);
    __m512i number = _mm512_set1_epi32(p.number);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 d = _mm512_loadu_ps(p.g + i), x = d;
        if (p.winner)
            d = _mm512_maskz_mov_ps(
                _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(p.winner + i), number), d);
        if (known == FROM_X || affine == COMBINED || affine == SUMMED)
            x = load_wide(p.x, x_type, p.first_x + i);
        if (known == FROM_X) {
            __m512 u = normalised_wide(x, p.m + i, p.s + i, p.t + i);
            d = damped(d, passes_wide(u, activation), slope, activation);
        }
        if (known == FROM_BITS) {
            uint16_t word;
            memcpy(&word, p.bits + (p.first + i) / 8, 2);
            d = damped(d, (__mmask16)word, slope, activation);
        }
        if (affine == COMBINED || affine == SUMMED)
            x = _mm512_sub_ps(x, _mm512_loadu_ps(p.m + i));
        if (affine == SUMMED) {
            add_wide(p.sum + i, p.product + i, _mm512_castps512_ps256(d),
                     _mm512_castps512_ps256(x));
            add_wide(p.sum + i + 8, p.product + i + 8, _mm512_extractf32x8_ps(d, 1),
                     _mm512_extractf32x8_ps(x, 1));
            continue;
        }
        if (affine != PLAIN)
            d = _mm512_mul_ps(d, _mm512_loadu_ps(p.s + i));
        if (affine == COMBINED) {
            d = _mm512_add_ps(d, _mm512_mul_ps(x, _mm512_loadu_ps(p.b + i)));
            d = _mm512_add_ps(d, _mm512_loadu_ps(p.c + i));
        }
        store_wide(p.target, y_type, p.first_y + i, d, past_caches);
    }
    return i;
}

INLINE int64_t gradient_wide(const gradient_step *p, int64_t n, int known, int affine,
                             int activation)
{
#define CALL(of_x, of_y) gradient_types(p, n, known, affine, activation, of_x, of_y)
    BY_TYPES(p->x_type, p->y_type, CALL)
#undef CALL
}

#define WAY(known, affine, activation)                                                            \
    case ((known) * 4 + (affine)) * 3 + (activation):                                             \
        return gradient_wide(p, n, known, affine, activation);

static int64_t gradient_wide_any(const gradient_step *p, int64_t n, int known, int affine)
{
    switch ((known * 4 + affine) * 3 + p->activation) {
        WAY(EVERYWHERE, PLAIN, IDENTITY)
        WAY(EVERYWHERE, SCALED, IDENTITY)
        WAY(EVERYWHERE, COMBINED, IDENTITY)
        WAY(FROM_X, SCALED, RELU)
        WAY(FROM_X, SCALED, LEAKY)
        WAY(FROM_X, COMBINED, RELU)
        WAY(FROM_X, COMBINED, LEAKY)
        WAY(EVERYWHERE, SUMMED, IDENTITY)
        WAY(FROM_X, SUMMED, RELU)
        WAY(FROM_X, SUMMED, LEAKY)
        WAY(FROM_BITS, PLAIN, RELU)
        WAY(FROM_BITS, PLAIN, LEAKY)
    }
    return 0;
}

#endif
#endif

/* A step in registers: read, computed and written sixteen elements at a time, with their bits.
 *
 * The same as the plain loops beside their callers, which do what is left over: the end of a step,
 * and bits that begin within a byte. Each returns how many elements it did. */
#ifndef HYPERSLAB_WIDE_H
#define HYPERSLAB_WIDE_H

#include "rows.h"

enum { IDENTITY, RELU, LEAKY };

/* A step of the forward pass: from element `first` of x to `first_y` of the target. */
typedef struct {
    void *target;
    int64_t y_type, stream, first_y;
    const void *x;
    int64_t x_type, first;
    const float *m, *s, *t; /* of `period` elements, in turn */
    int64_t period;
    float slope;
    uint8_t *bits;
} forward_step;

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
#ifdef __AVX512BF16__ /* by the processor, unless there are subnormal numbers: it takes those for zero */
    __m512i size = _mm512_and_si512(word, _mm512_set1_epi32(0x7fffffff));
    __m512i one = _mm512_set1_epi32(1), largest = _mm512_set1_epi32(0x7fffff);
    if (!_mm512_cmplt_epu32_mask(_mm512_sub_epi32(size, one), largest))
        return (__m256i)_mm512_cvtneps_pbh(values);
#endif
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

/* What a normalisation, and the gradient through it, have for sixteen elements. */
typedef struct {
    __m512 mean, scale, shift, slope, constant;
} wide_numbers;

/* So many vectors of numbers and sums stay in registers where elements have them in turn. */
#define VECTORS 4

INLINE __m512 normalised_wide(__m512 x, const wide_numbers *q)
{
    __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(x, q->mean), q->scale);
    return _mm512_add_ps(scaled, q->shift);
}

INLINE wide_numbers scales_at(const float *m, const float *s, const float *t, int64_t i)
{
    wide_numbers q = {_mm512_loadu_ps(m + i), _mm512_loadu_ps(s + i), _mm512_loadu_ps(t + i)};
    return q;
}

/* DO(j, v) for every whole vector of n elements, from element j on: its numbers and sums are the v-th
 * of so many `vectors`, in turn. Afterwards j is behind the last one. */
#define FOR_VECTORS(vectors, j, n, DO)                                                            \
    for (; j + 16 * vectors <= n; j += 16 * vectors)                                              \
        for (int v = 0; v < vectors; v++)                                                         \
            DO(j + 16 * v, v);                                                                    \
    for (int v = 0; v < vectors; v++)                                                             \
        if (j + 16 <= n) {                                                                        \
            DO(j, v);                                                                             \
            j += 16;                                                                              \
        }

INLINE void activate_at(const forward_step *p, int64_t i, const wide_numbers *q, int activation,
                        int scaled, int add, int64_t x_type, int64_t y_type, int past_caches)
{
    __m512 u = load_wide(p->x, x_type, p->first + i);
    if (scaled)
        u = normalised_wide(u, q);
    if (activation != IDENTITY) {
        __mmask16 passes = passes_wide(u, activation);
        if (p->bits) {
            uint16_t word = (uint16_t)passes;
            memcpy(p->bits + (p->first + i) / 8, &word, 2);
        }
        u = damped(u, passes, _mm512_set1_ps(p->slope), activation);
    }
    if (add)
        u = _mm512_add_ps(_mm512_loadu_ps((float *)p->target + p->first_y + i), u);
    store_wide(p->target, y_type, p->first_y + i, u, past_caches);
}

/* target[first_y + i] (+)= activation((x[first + i] - m[i]) * s[i] + t[i]); bits[first + i].
 * With so many `vectors` of numbers; 0: each vector has its own. */
INLINE int64_t activate_types(const forward_step *step, int64_t n, int activation, int scaled,
                              int add, int64_t x_type, int64_t y_type, int vectors)
{
    const forward_step p = *step; /* so that it is known not to change */
    if (p.bits && p.first % 8)
        return 0;
    int past_caches = p.stream && can_stream(p.target, y_type, p.first_y);
    wide_numbers q[VECTORS] = {0};
    int64_t i = 0;
#define DO(j, v) activate_at(&p, j, q + (v), activation, scaled, add, x_type, y_type, past_caches)
    if (!vectors) {
        for (; i + 16 <= n; i += 16) {
            if (scaled)
                q[0] = scales_at(p.m, p.s, p.t, i);
            DO(i, 0);
        }
        return i;
    }
    for (int v = 0; v < vectors; v++)
        q[v] = scales_at(p.m, p.s, p.t, 16 * v);
    FOR_VECTORS(vectors, i, n, DO)
#undef DO
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

INLINE int64_t activate_wide(const forward_step *p, int64_t n, int activation, int scaled, int add)
{
#define CALL(of_x, of_y) activate_types(p, n, activation, scaled, add, of_x, of_y, 0)
#define IN_REGISTERS(of_x, of_y) activate_types(p, n, activation, 1, 0, of_x, of_y, VECTORS)
    if (scaled && !add && p->period == 16 * VECTORS) {
        if (p->x_type == FLOAT32 && p->y_type == FLOAT32)
            return IN_REGISTERS(FLOAT32, FLOAT32);
        if (p->x_type == BFLOAT16 && p->y_type == BFLOAT16)
            return IN_REGISTERS(BFLOAT16, BFLOAT16);
    }
    BY_TYPES(p->x_type, p->y_type, CALL)
#undef IN_REGISTERS
#undef CALL
}

#endif
#endif

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
    int64_t period; /* a multiple of 16: numbers and sums are those of so many elements, in turn */
    const uint8_t *bits;
    int64_t first; /* bit */
    float slope;
    int activation;
} gradient_step;

/* Sums of sixteen elements in registers. */
typedef struct {
    __m512d sum[2], product[2];
} wide_sums;

INLINE wide_sums load_sums(const double *sum, const double *product)
{
    wide_sums all = {{_mm512_loadu_pd(sum), _mm512_loadu_pd(sum + 8)},
                     {_mm512_loadu_pd(product), _mm512_loadu_pd(product + 8)}};
    return all;
}

INLINE void store_sums(double *sum, double *product, const wide_sums *all)
{
    for (int half = 0; half < 2; half++) {
        _mm512_storeu_pd(sum + 8 * half, all->sum[half]);
        _mm512_storeu_pd(product + 8 * half, all->product[half]);
    }
}

INLINE __m512d half_of(__m512 values, int half)
{
    return _mm512_cvtps_pd(half ? _mm512_extractf32x8_ps(values, 1) : _mm512_castps512_ps256(values));
}

INLINE void add_wide(wide_sums *all, __m512 d, __m512 x)
{
    for (int half = 0; half < 2; half++) {
        __m512d wide_d = half_of(d, half);
        all->sum[half] = _mm512_add_pd(all->sum[half], wide_d);
        all->product[half] = _mm512_fmadd_pd(wide_d, half_of(x, half), all->product[half]);
    }
}

/* Sixteen elements from `j` on, which have the numbers from `i` on. */
INLINE void gradient_at(const gradient_step *p, int64_t j, int64_t i, int known, int affine,
                        int activation, int64_t x_type, int64_t y_type, int past_caches,
                        wide_sums *all)
{
    __m512 d = _mm512_loadu_ps(p->g + j), x = d;
    if (p->winner)
        d = _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(p->winner + j),
                                                        _mm512_set1_epi32(p->number)),
                                d);
    if (known == FROM_X || affine == COMBINED || affine == SUMMED)
        x = load_wide(p->x, x_type, p->first_x + j);
    if (known == FROM_X) {
        __m512 u = normalised_wide(x, p->m + i, p->s + i, p->t + i);
        d = damped(d, passes_wide(u, activation), _mm512_set1_ps(p->slope), activation);
    }
    if (known == FROM_BITS) {
        uint16_t word;
        memcpy(&word, p->bits + (p->first + j) / 8, 2);
        d = damped(d, (__mmask16)word, _mm512_set1_ps(p->slope), activation);
    }
    if (affine == COMBINED || affine == SUMMED)
        x = _mm512_sub_ps(x, _mm512_loadu_ps(p->m + i));
    if (affine == SUMMED) {
        add_wide(all, d, x);
        return;
    }
    if (affine != PLAIN)
        d = _mm512_mul_ps(d, _mm512_loadu_ps(p->s + i));
    if (affine == COMBINED) {
        d = _mm512_add_ps(d, _mm512_mul_ps(x, _mm512_loadu_ps(p->b + i)));
        d = _mm512_add_ps(d, _mm512_loadu_ps(p->c + i));
    }
    store_wide(p->target, y_type, p->first_y + j, d, past_caches);
}

INLINE int64_t gradient_types(const gradient_step *step, int64_t n, int known, int affine,
                              int activation, int64_t x_type, int64_t y_type)
{
    const gradient_step p = *step; /* so that it is known not to change */
    if (known == FROM_BITS && p.first % 8)
        return 0;
    int past_caches = p.stream && can_stream(p.target, y_type, p.first_y);
    wide_sums all = {0};
    if (affine != SUMMED) {
        for (int64_t i = 0; i + 16 <= n; i += 16)
            gradient_at(&p, i, i, known, affine, activation, x_type, y_type, past_caches, &all);
        return n / 16 * 16;
    }
    for (int64_t i = 0, j = 0; j + 16 <= n; j += 16, i = i + 16 < p.period ? i + 16 : 0) {
        all = load_sums(p.sum + i, p.product + i);
        gradient_at(&p, j, i, known, SUMMED, activation, x_type, y_type, 0, &all);
        store_sums(p.sum + i, p.product + i, &all);
    }
    return n / 16 * 16;
}

/* Sums of x - m and of its squares. */
INLINE int64_t around_types(const gradient_step *step, int64_t n, int64_t x_type)
{
    const gradient_step p = *step;
    for (int64_t i = 0, j = 0; j + 16 <= n; j += 16, i = i + 16 < p.period ? i + 16 : 0) {
        wide_sums all = load_sums(p.sum + i, p.product + i);
        __m512 pivot = _mm512_loadu_ps(p.m + i), x = load_wide(p.x, x_type, p.first_x + j);
        for (int half = 0; half < 2; half++) {
            __m512d d = _mm512_sub_pd(half_of(x, half), half_of(pivot, half));
            all.sum[half] = _mm512_add_pd(all.sum[half], d);
            all.product[half] = _mm512_fmadd_pd(d, d, all.product[half]);
        }
        store_sums(p.sum + i, p.product + i, &all);
    }
    return n / 16 * 16;
}

INLINE int64_t around_wide(const gradient_step *p, int64_t n)
{
    if (p->x_type == FLOAT32)
        return around_types(p, n, FLOAT32);
    if (p->x_type == BFLOAT16)
        return around_types(p, n, BFLOAT16);
    return around_types(p, n, FLOAT16);
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

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
    int64_t i = 0, whole = 16 * vectors;
    if (!vectors) {
        for (; i + 16 <= n; i += 16) {
            if (scaled)
                q[0] = scales_at(p.m, p.s, p.t, i);
            activate_at(&p, i, q, activation, scaled, add, x_type, y_type, past_caches);
        }
        return i;
    }
    for (int v = 0; v < vectors; v++)
        q[v] = scales_at(p.m, p.s, p.t, 16 * v);
    for (; i + whole <= n; i += whole)
        for (int v = 0; v < vectors; v++)
            activate_at(&p, i + 16 * v, q + v, activation, scaled, add, x_type, y_type,
                        past_caches);
    for (int v = 0; v < vectors; v++)
        if (i + 16 <= n) {
            activate_at(&p, i, q + v, activation, scaled, add, x_type, y_type, past_caches);
            i += 16;
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

/* The gradient of a step and what becomes of it. */
typedef struct {
    void *target;
    int64_t y_type, stream, first_y;
    const void *x;
    int64_t x_type, first_x;
    const void *g;
    int64_t g_type, first_g;
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

/* The numbers of sixteen elements from `i` on, those that are read. */
INLINE wide_numbers numbers_at(const gradient_step *p, int64_t i, int known, int affine)
{
    wide_numbers q = {0};
    if (known == FROM_X)
        q = scales_at(p->m, p->s, p->t, i);
    else if (affine == COMBINED || affine == SUMMED)
        q.mean = _mm512_loadu_ps(p->m + i);
    if (affine == SCALED || affine == COMBINED)
        q.scale = _mm512_loadu_ps(p->s + i);
    if (affine == COMBINED) {
        q.slope = _mm512_loadu_ps(p->b + i);
        q.constant = _mm512_loadu_ps(p->c + i);
    }
    return q;
}

/* Sixteen elements from `j` on. */
INLINE void gradient_at(const gradient_step *p, int64_t j, const wide_numbers *q, int known,
                        int affine, int activation, int64_t g_type, int64_t x_type, int64_t y_type,
                        int past_caches, wide_sums *all)
{
    __m512 d = load_wide(p->g, g_type, p->first_g + j), x = d;
    if (p->winner)
        d = _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(p->winner + j),
                                                        _mm512_set1_epi32(p->number)),
                                d);
    if (known == FROM_X || affine == COMBINED || affine == SUMMED)
        x = load_wide(p->x, x_type, p->first_x + j);
    if (known == FROM_X) {
        __m512 u = normalised_wide(x, q);
        d = damped(d, passes_wide(u, activation), _mm512_set1_ps(p->slope), activation);
    }
    if (known == FROM_BITS) {
        uint16_t word;
        memcpy(&word, p->bits + (p->first + j) / 8, 2);
        d = damped(d, (__mmask16)word, _mm512_set1_ps(p->slope), activation);
    }
    if (affine == COMBINED || affine == SUMMED)
        x = _mm512_sub_ps(x, q->mean);
    if (affine == SUMMED) {
        add_wide(all, d, x);
        return;
    }
    if (affine != PLAIN)
        d = _mm512_mul_ps(d, q->scale);
    if (affine == COMBINED) {
        d = _mm512_add_ps(d, _mm512_mul_ps(x, q->slope));
        d = _mm512_add_ps(d, q->constant);
    }
    store_wide(p->target, y_type, p->first_y + j, d, past_caches);
}

/* Each vector has its own numbers and sums. */
INLINE int64_t gradient_plain(const gradient_step *p, int64_t n, int known, int affine,
                              int activation, int64_t g_type, int64_t x_type, int64_t y_type,
                              int past_caches)
{
    wide_sums all = {0};
    for (int64_t i = 0, j = 0; j + 16 <= n; j += 16, i = i + 16 < p->period ? i + 16 : 0) {
        wide_numbers q = numbers_at(p, i, known, affine);
        if (affine == SUMMED)
            all = load_sums(p->sum + i, p->product + i);
        gradient_at(p, j, &q, known, affine, activation, g_type, x_type, y_type, past_caches, &all);
        if (affine == SUMMED)
            store_sums(p->sum + i, p->product + i, &all);
    }
    return n / 16 * 16;
}

/* With so many `vectors` of numbers and sums; 0: each vector has its own. */
INLINE int64_t gradient_types(const gradient_step *step, int64_t n, int known, int affine,
                              int activation, int64_t g_type, int64_t x_type, int64_t y_type,
                              int vectors)
{
    const gradient_step p = *step; /* so that it is known not to change */
    if (known == FROM_BITS && p.first % 8)
        return 0;
    int past_caches = p.stream && can_stream(p.target, y_type, p.first_y);
    if (!vectors)
        return gradient_plain(&p, n, known, affine, activation, g_type, x_type, y_type,
                              past_caches);
    wide_numbers q[VECTORS];
    wide_sums all[VECTORS];
    for (int v = 0; v < vectors; v++) {
        q[v] = numbers_at(&p, 16 * v, known, affine);
        if (affine == SUMMED)
            all[v] = load_sums(p.sum + 16 * v, p.product + 16 * v);
    }
    int64_t j = 0, whole = 16 * vectors;
    for (; j + whole <= n; j += whole)
        for (int v = 0; v < vectors; v++)
            gradient_at(&p, j + 16 * v, q + v, known, affine, activation, g_type, x_type, y_type,
                        past_caches, all + v);
    for (int v = 0; v < vectors; v++)
        if (j + 16 <= n) {
            gradient_at(&p, j, q + v, known, affine, activation, g_type, x_type, y_type,
                        past_caches, all + v);
            j += 16;
        }
    if (affine == SUMMED)
        for (int v = 0; v < vectors; v++)
            store_sums(p.sum + 16 * v, p.product + 16 * v, all + v);
    return j;
}

INLINE void around_at(const gradient_step *p, int64_t j, __m512 pivot, int64_t x_type,
                      wide_sums *all)
{
    __m512 x = load_wide(p->x, x_type, p->first_x + j);
    for (int half = 0; half < 2; half++) {
        __m512d d = _mm512_sub_pd(half_of(x, half), half_of(pivot, half));
        all->sum[half] = _mm512_add_pd(all->sum[half], d);
        all->product[half] = _mm512_fmadd_pd(d, d, all->product[half]);
    }
}

/* Sums of x - m and of its squares. */
INLINE int64_t around_types(const gradient_step *step, int64_t n, int64_t x_type, int vectors)
{
    const gradient_step p = *step;
    wide_sums all[VECTORS];
    int64_t j = 0, whole = 16 * vectors;
    if (!vectors) {
        for (int64_t i = 0; j + 16 <= n; j += 16, i = i + 16 < p.period ? i + 16 : 0) {
            all[0] = load_sums(p.sum + i, p.product + i);
            around_at(&p, j, _mm512_loadu_ps(p.m + i), x_type, all);
            store_sums(p.sum + i, p.product + i, all);
        }
        return j;
    }
    for (int v = 0; v < vectors; v++)
        all[v] = load_sums(p.sum + 16 * v, p.product + 16 * v);
    for (; j + whole <= n; j += whole)
        for (int v = 0; v < vectors; v++)
            around_at(&p, j + 16 * v, _mm512_loadu_ps(p.m + 16 * v), x_type, all + v);
    for (int v = 0; v < vectors; v++)
        if (j + 16 <= n) {
            around_at(&p, j, _mm512_loadu_ps(p.m + 16 * v), x_type, all + v);
            j += 16;
        }
    for (int v = 0; v < vectors; v++)
        store_sums(p.sum + 16 * v, p.product + 16 * v, all + v);
    return j;
}

INLINE int64_t around_wide(const gradient_step *p, int64_t n)
{
    int few = p->period == 16 * VECTORS;
    if (p->x_type == FLOAT32)
        return few ? around_types(p, n, FLOAT32, VECTORS) : around_types(p, n, FLOAT32, 0);
    if (p->x_type == BFLOAT16)
        return few ? around_types(p, n, BFLOAT16, VECTORS) : around_types(p, n, BFLOAT16, 0);
    return around_types(p, n, FLOAT16, 0);
}

INLINE int64_t gradient_wide(const gradient_step *p, int64_t n, int known, int affine,
                             int activation)
{
    int64_t y_type = affine == SUMMED ? p->x_type : p->y_type; /* nothing is written */
    int reads_x = known == FROM_X || affine == COMBINED || affine == SUMMED;
    int64_t x_type = reads_x ? p->x_type : p->g_type;
    int same = p->g_type == x_type && x_type == y_type;
    int few = affine != PLAIN && p->period == 16 * VECTORS;
#define CALL(of_g, of_x, of_y, vectors)                                                           \
    gradient_types(p, n, known, affine, activation, of_g, of_x, of_y, vectors)
    if (same && few && x_type == FLOAT32)
        return CALL(FLOAT32, FLOAT32, FLOAT32, VECTORS);
    if (same && few && x_type == BFLOAT16)
        return CALL(BFLOAT16, BFLOAT16, BFLOAT16, VECTORS);
    if (same && x_type == FLOAT32)
        return CALL(FLOAT32, FLOAT32, FLOAT32, 0);
    if (same && x_type == BFLOAT16)
        return CALL(BFLOAT16, BFLOAT16, BFLOAT16, 0);
    return CALL(p->g_type, x_type, y_type, 0);
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
        WAY(FROM_BITS, PLAIN, RELU)
        WAY(FROM_BITS, PLAIN, LEAKY)
    }
    return 0;
}

/* The sums instead. */
static int64_t sums_wide_any(const gradient_step *p, int64_t n, int known)
{
    switch ((known * 4 + SUMMED) * 3 + p->activation) {
        WAY(EVERYWHERE, SUMMED, IDENTITY)
        WAY(FROM_X, SUMMED, RELU)
        WAY(FROM_X, SUMMED, LEAKY)
    }
    return 0;
}

#endif
#endif

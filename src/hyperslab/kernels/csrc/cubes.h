/* Averages over cubes of two voxels a side, and their gradients.
 *
 * The commonest of all poolings, in channels last with whole vectors of channels and no normalisation:
 * the same as `forward.c` and `backward.c` otherwise do row by row, but every element passes once
 * through registers. */
#ifndef HYPERSLAB_CUBES_H
#define HYPERSLAB_CUBES_H

#include "chain.h"

#if WIDE

INLINE int averages_cubes(const chain *k)
{
    int cubes = k->pool_depth == 2 && k->pool_height == 2 && k->pool_width == 2;
    return cubes && !k->maximum && !k->norm && k->channels % 16 == 0;
}

/* In float32 memory is the limit either way. */
INLINE int spreads_cubes(const chain *k)
{
    int known = k->bits || activation_of(k) == IDENTITY;
    return averages_cubes(k) && known && k->y_type != FLOAT32;
}

/* The first element of each of the four rows of a line of cubes. */
INLINE void rows_of_cubes(const chain *k, const cursor *at, int64_t line, int64_t *rows)
{
    for (int64_t i = 0; i < 4; i++) {
        int64_t plane = at->block * k->depth + 2 * at->plane + i / 2;
        rows[i] = (plane * k->height + 2 * line + i % 2) * k->width * k->channels;
    }
}

/* What passes and what does not differ by the slope alone. */
INLINE void spread_line(const chain *k, const int64_t *rows, int64_t first, int64_t begin,
                        int64_t end, int activation, int64_t g_type, int64_t y_type)
{
    __m512 slope = _mm512_set1_ps((float)k->slope), eighth = _mm512_set1_ps(0.125f);
    int past_caches = k->stream && can_stream(k->y, y_type, rows[0]);
    for (int64_t tile = begin; tile < end; tile++)
        for (int64_t c = 0; c < k->channels; c += 16) {
            __m512 g = load_wide(k->g, g_type, first + tile * k->channels + c);
            g = _mm512_mul_ps(g, eighth);
            __m512 other = activation == LEAKY ? _mm512_mul_ps(g, slope) : _mm512_setzero_ps();
            __m256i passing = halves_of(g, y_type), damped_ones = halves_of(other, y_type);
            for (int i = 0; i < 8; i++) {
                int64_t to = rows[i / 2] + (2 * tile + i % 2) * k->channels + c;
                uint16_t word = 0xffff;
                if (activation != IDENTITY)
                    memcpy(&word, k->bits + to / 8, 2);
                __m256i *target = (void *)((uint16_t *)k->y + to);
                __m256i dx = _mm256_mask_mov_epi16(damped_ones, word, passing);
                if (past_caches)
                    _mm256_stream_si256(target, dx);
                else
                    _mm256_storeu_si256(target, dx);
            }
        }
}

INLINE int spread_cubes_of_run(const chain *given, const cursor *at, int activation, int64_t g_type,
                               int64_t y_type)
{
    const chain known = *given, *k = &known; /* so that it is known not to change */
    for (int64_t line = at->line; line < at->line + lines_here(at); line++) {
        int64_t rows[4];
        rows_of_cubes(k, at, line, rows);
        int64_t first = ((at->block * at->planes + at->plane) * at->lines + line) * at->tiles;
        spread_line(k, rows, first * k->channels, at->tile, at->tile + tiles_here(at), activation,
                    g_type, y_type);
    }
    return 1;
}

INLINE int spread_by_types(const chain *k, const cursor *at, int activation)
{
#define CALL(y_type, g_type) spread_cubes_of_run(k, at, activation, g_type, y_type)
    BY_TYPES(k->y_type, k->g_type, CALL)
#undef CALL
}

/* One run of the backward pass; 0 where it is not of this kind. */
INLINE int spread_cubes(const chain *k, const cursor *at)
{
    if (!spreads_cubes(k))
        return 0;
    if (activation_of(k) == LEAKY)
        return spread_by_types(k, at, LEAKY);
    if (activation_of(k) == RELU)
        return spread_by_types(k, at, RELU);
    return spread_by_types(k, at, IDENTITY);
}

/* Sixteen channels of a voxel, activated. */
INLINE __m512 activated_at(const chain *k, int64_t at, int activation, int64_t x_type)
{
    __m512 x = load_wide(k->x, x_type, at);
    if (activation == IDENTITY)
        return x;
    __mmask16 passes = passes_wide(x, activation);
    if (k->bits) {
        uint16_t word = (uint16_t)passes;
        memcpy(k->bits + at / 8, &word, 2);
    }
    return damped(x, passes, _mm512_set1_ps((float)k->slope), activation);
}

/* The processor foresees one run of memory, not four that end after a line: so it is told of the
 * lines that come next, `ahead` elements on. */
INLINE void average_line(const chain *k, const int64_t *rows, int64_t first, int64_t begin,
                         int64_t end, int64_t ahead, int activation, int64_t x_type, int64_t y_type)
{
    __m512 eighth = _mm512_set1_ps(0.125f);
    for (int64_t tile = begin; tile < end; tile++)
        for (int64_t c = 0; c < k->channels; c += 16) {
            __m512 sum[2];
            for (int w = 0; w < 2; w++) {
                __m512 a[4];
                for (int i = 0; i < 4; i++) {
                    int64_t at = rows[i] + (2 * tile + w) * k->channels + c;
                    if (w == 0 || k->channels > 16 || x_type == FLOAT32)
                        _mm_prefetch((const char *)k->x + (at + ahead) * size_of[x_type], _MM_HINT_T0);
                    a[i] = activated_at(k, at, activation, x_type);
                }
                sum[w] = _mm512_add_ps(_mm512_add_ps(a[0], a[2]), _mm512_add_ps(a[1], a[3]));
            }
            __m512 mean = _mm512_mul_ps(_mm512_add_ps(sum[0], sum[1]), eighth);
            store_wide(k->y, y_type, first + tile * k->channels + c, mean, 0);
        }
}

INLINE int average_cubes_of_run(const chain *given, const cursor *at, int activation,
                                int64_t x_type, int64_t y_type)
{
    const chain known = *given, *k = &known; /* so that it is known not to change */
    for (int64_t line = at->line; line < at->line + lines_here(at); line++) {
        int64_t rows[4];
        rows_of_cubes(k, at, line, rows);
        int64_t first = ((at->block * at->planes + at->plane) * at->lines + line) * at->tiles;
        average_line(k, rows, first * k->channels, at->tile, at->tile + tiles_here(at),
                     2 * k->width * k->channels, activation, x_type, y_type);
    }
    return 1;
}

INLINE int average_by_types(const chain *k, const cursor *at, int activation)
{
#define CALL(x_type, y_type) average_cubes_of_run(k, at, activation, x_type, y_type)
    BY_TYPES(k->x_type, k->y_type, CALL)
#undef CALL
}

/* One run of the forward pass; 0 where it is not of this kind. */
INLINE int average_cubes(const chain *k, const cursor *at)
{
    if (!averages_cubes(k))
        return 0;
    if (activation_of(k) == LEAKY)
        return average_by_types(k, at, LEAKY);
    if (activation_of(k) == RELU)
        return average_by_types(k, at, RELU);
    return average_by_types(k, at, IDENTITY);
}

#endif
#endif

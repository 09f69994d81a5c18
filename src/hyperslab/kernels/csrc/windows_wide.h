/* Windows over a block, and what a processor with AVX-512 computes 16 channels at a time.
 *
 * A result, or an element of the block, is finished in registers: in channels last the channels of
 * a voxel lie side by side. Elsewhere, and for other numbers of channels, `windows.c` goes by rows. */
#ifndef HYPERSLAB_WINDOWS_WIDE_H
#define HYPERSLAB_WINDOWS_WIDE_H

#include "wide.h"

#include <math.h>

enum { DEPTH, HEIGHT, WIDTH };

typedef struct {
    const void *from; /* the block; in the backward pass the gradient of the result */
    void *to;         /* the result; in the backward pass that of the block */
    uint8_t *winners; /* of the result; none: 0 */
    int64_t from_type, to_type;
    int64_t blocks, channels;
    int64_t extents[3], results[3], kernel[3], stride[3], padding[3];
    int64_t part, parts;
} windows;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The results [lo, hi) along a dim whose tap `t` lies in the block. */
INLINE void reached(const windows *k, int dim, int64_t t, int64_t *lo, int64_t *hi)
{
    int64_t stride = k->stride[dim], before = k->padding[dim] - t;
    int64_t last = k->extents[dim] - 1 + before;
    *lo = before > 0 ? (before + stride - 1) / stride : 0;
    *hi = last < 0 ? 0 : smaller(last / stride + 1, k->results[dim]);
}

/* Rows that the windows of a row of results read, or whose gradients a row of the block gets: the
 * first element of each, and the tap that its first column is. At most 256, as there are taps. */
typedef struct {
    int64_t count, first[256];
    int32_t tap[256];
} row_list;

INLINE void add_row_to(row_list *rows, int64_t first, int64_t tap)
{
    rows->first[rows->count] = first;
    rows->tap[rows->count++] = (int32_t)tap;
}

#if WIDE
#define STREAMED (16 << 20) /* bytes of a result that would only empty the caches */

/* One result for `parts` times 16 channels, from the columns [t, end) of each row. */
INLINE void best_of(const windows *k, const row_list *rows, int64_t column, int64_t t, int64_t end,
                    int64_t at, int parts, int64_t from_type, int64_t to_type)
{
    __m512 best[4];
    __m512i winner[4];
    for (int p = 0; p < parts; p++) {
        best[p] = _mm512_set1_ps(-INFINITY);
        winner[p] = _mm512_set1_epi32(rows->tap[0] + (int32_t)t);
    }
    for (int64_t r = 0; r < rows->count; r++)
        for (int64_t i = t; i < end; i++) {
            int64_t from = rows->first[r] + column + i * k->channels;
            __m512i tap = _mm512_set1_epi32(rows->tap[r] + (int32_t)i);
            for (int p = 0; p < parts; p++) {
                __m512 value = load_wide(k->from, from_type, from + 16 * p);
                __mmask16 wins = _mm512_cmp_ps_mask(value, best[p], _CMP_GT_OQ) |
                                 _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
                best[p] = _mm512_mask_mov_ps(best[p], wins, value);
                winner[p] = _mm512_mask_mov_epi32(winner[p], wins, tap);
            }
        }
    for (int p = 0; p < parts; p++) {
        store_wide(k->to, to_type, at + 16 * p, best[p], 0);
        if (k->winners)
            _mm_storeu_si128((void *)(k->winners + at + 16 * p), _mm512_cvtepi32_epi8(winner[p]));
    }
}

INLINE int maxima_of_types(const windows *k, const row_list *rows, int64_t at, int64_t from_type,
                           int64_t to_type)
{
    for (int64_t o = 0; o < k->results[WIDTH]; o++) {
        int64_t column = o * k->stride[WIDTH] - k->padding[WIDTH];
        int64_t t = larger(0, -column), end = smaller(k->kernel[WIDTH], k->extents[WIDTH] - column);
        int64_t c = 0, channels = k->channels;
        for (; c + 64 <= channels; c += 64)
            best_of(k, rows, column * channels + c, t, end, at + o * channels + c, 4, from_type,
                    to_type);
        for (; c < channels; c += 16)
            best_of(k, rows, column * channels + c, t, end, at + o * channels + c, 1, from_type,
                    to_type);
    }
    return 0;
}

/* Row `line` of plane `plane` of a block's results. */
static int maxima_in_registers(const windows *k, int64_t block, int64_t plane, int64_t line)
{
    row_list rows;
    rows.count = 0;
    int64_t d = plane * k->stride[DEPTH] - k->padding[DEPTH];
    int64_t h = line * k->stride[HEIGHT] - k->padding[HEIGHT];
    for (int64_t i = larger(0, -d); i < smaller(k->kernel[DEPTH], k->extents[DEPTH] - d); i++)
        for (int64_t j = larger(0, -h); j < smaller(k->kernel[HEIGHT], k->extents[HEIGHT] - h); j++) {
            int64_t row = (block * k->extents[DEPTH] + d + i) * k->extents[HEIGHT] + h + j;
            add_row_to(&rows, row * k->extents[WIDTH] * k->channels,
                       (i * k->kernel[HEIGHT] + j) * k->kernel[WIDTH]);
        }
    int64_t row = (block * k->results[DEPTH] + plane) * k->results[HEIGHT] + line;
    int64_t at = row * k->results[WIDTH] * k->channels;
#define CALL(from_type, to_type) maxima_of_types(k, &rows, at, from_type, to_type)
    BY_TYPES(k->from_type, k->to_type, CALL)
#undef CALL
}

/* One element of the block for `parts` times 16 channels: of the results [o, end) of each row. */
INLINE void sum_of(const windows *k, const row_list *rows, int64_t column, int64_t o, int64_t end,
                   int64_t at, int64_t c, int parts, int past_caches, int64_t from_type,
                   int64_t to_type)
{
    __m512 sum[4];
    for (int p = 0; p < parts; p++)
        sum[p] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rows->count; r++)
        for (int64_t i = end - 1; i >= o; i--) {
            int64_t from = rows->first[r] + i * k->channels + c;
            __m128i tap = _mm_set1_epi8((char)(rows->tap[r] + column - i * k->stride[WIDTH]));
            for (int p = 0; p < parts; p++) {
                __m128i winner = _mm_loadu_si128((const void *)(k->winners + from + 16 * p));
                __mmask16 wins = _mm_cmpeq_epi8_mask(winner, tap);
                sum[p] = _mm512_mask_add_ps(sum[p], wins, sum[p],
                                            load_wide(k->from, from_type, from + 16 * p));
            }
        }
    for (int p = 0; p < parts; p++)
        store_wide(k->to, to_type, at + c + 16 * p, sum[p], past_caches);
}

INLINE int sums_of_types(const windows *k, const row_list *rows, int64_t at, int past_caches,
                         int64_t from_type, int64_t to_type)
{
    int64_t stride = k->stride[WIDTH], channels = k->channels;
    for (int64_t w = 0; w < k->extents[WIDTH]; w++, at += channels) {
        int64_t column = w + k->padding[WIDTH], before = column - k->kernel[WIDTH] + 1;
        int64_t o = before > 0 ? (before + stride - 1) / stride : 0;
        int64_t end = smaller(column / stride + 1, k->results[WIDTH]), c = 0;
        for (; c + 64 <= channels; c += 64)
            sum_of(k, rows, column, o, end, at, c, 4, past_caches, from_type, to_type);
        for (; c < channels; c += 16)
            sum_of(k, rows, column, o, end, at, c, 1, past_caches, from_type, to_type);
    }
    return 0;
}

/* The row of the block that begins at `at`; `rows` are of results. */
static int sums_in_registers(const windows *k, const row_list *rows, int64_t at, int past_caches)
{
#define CALL(from_type, to_type) sums_of_types(k, rows, at, past_caches, from_type, to_type)
    BY_TYPES(k->from_type, k->to_type, CALL)
#undef CALL
}
#endif
#endif

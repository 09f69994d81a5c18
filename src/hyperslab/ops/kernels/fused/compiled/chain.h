/* The chain of normalisation, activation and pooling on one block; see the Python package.
 *
 * The block is (blocks, depth, height, width, channels) in memory: in channels last a sample is a
 * block, in contiguous memory a channel of a sample is one, with one channel. Scales are
 * (scale_rows, channels); block `i` has row `i % scale_rows`. */
#ifndef HYPERSLAB_CHAIN_H
#define HYPERSLAB_CHAIN_H

#include "rows.h"

typedef struct {
    const void *x;
    const void *g; /* gradient of the result */
    void *y;       /* the result; in the backward pass dx */
    uint8_t *bits;
    uint8_t *winners;
    const float *scale, *shift, *b, *c;
    double *sums; /* (parts, 2, scale_rows, channels) */
    int64_t x_type, g_type, y_type;
    int64_t blocks, depth, height, width, channels, scale_rows;
    int64_t pool_depth, pool_height, pool_width, maximum;
    int64_t stream; /* write past the caches */
    double slope;
    int64_t part, parts; /* this call does the part-th of so many */
} chain;

enum { IDENTITY, RELU, LEAKY };

INLINE int activation_of(const chain *k)
{
    return k->slope == 1 ? IDENTITY : k->slope == 0 ? RELU : LEAKY;
}

/* A piece: some tiles side by side along the width. `rows` rows of the block's elements meet in it,
 * `row_of` says where each begins. */
typedef struct {
    int64_t block, plane, line, chunk;  /* of the result */
    int64_t lines, planes, chunks;      /* of a block of the result, of a line */
    int64_t tiles_in_chunk, line_tiles; /* along the width */
    int64_t left;                       /* pieces that this part still has */
} cursor;

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* Elements of a row of the largest piece. */
INLINE int64_t row_size(const chain *k, const cursor *at)
{
    return at->tiles_in_chunk * k->pool_width * k->channels;
}

/* Pieces of about `target` elements a row, and those of this part. Parts that write bits must not
 * meet in a byte; where they would the first one does everything. */
static cursor begin(const chain *k, int64_t target)
{
    cursor at = {0};
    int64_t tile = k->pool_width * k->channels;
    at.line_tiles = k->width / k->pool_width;
    at.lines = k->height / k->pool_height;
    at.planes = k->depth / k->pool_depth;
    at.tiles_in_chunk = target / tile / 16 * 16;
    if (at.tiles_in_chunk == 0)
        at.tiles_in_chunk = tile * 8 <= 4 * target ? 8 : 1;
    at.tiles_in_chunk = min_of(at.tiles_in_chunk, at.line_tiles);
    if (at.tiles_in_chunk == 0)
        return at;
    at.chunks = (at.line_tiles + at.tiles_in_chunk - 1) / at.tiles_in_chunk;
    int64_t total = k->blocks * at.planes * at.lines * at.chunks;
    int64_t first = total / k->parts * k->part + min_of(k->part, total % k->parts);
    int64_t count = total / k->parts + (k->part < total % k->parts);
    int whole_bytes = k->width * k->channels % 8 == 0 && row_size(k, &at) % 8 == 0;
    if (k->bits && !whole_bytes) {
        first = 0;
        count = k->part == 0 ? total : 0;
    }
    at.left = count;
    at.chunk = first % at.chunks;
    first /= at.chunks;
    at.line = first % at.lines;
    first /= at.lines;
    at.plane = first % at.planes;
    at.block = first / at.planes;
    return at;
}

INLINE void advance(cursor *at)
{
    at->left--;
    if (++at->chunk < at->chunks)
        return;
    at->chunk = 0;
    if (++at->line < at->lines)
        return;
    at->line = 0;
    if (++at->plane < at->planes)
        return;
    at->plane = 0;
    at->block++;
}

INLINE int64_t tiles_here(const cursor *at)
{
    return min_of(at->tiles_in_chunk, at->line_tiles - at->chunk * at->tiles_in_chunk);
}

/* The first element of the row at `(i, j)` within the tiles. */
INLINE int64_t row_of(const chain *k, const cursor *at, int64_t i, int64_t j)
{
    int64_t plane = at->block * k->depth + at->plane * k->pool_depth + i;
    int64_t line = plane * k->height + at->line * k->pool_height + j;
    int64_t voxel = line * k->width + at->chunk * at->tiles_in_chunk * k->pool_width;
    return voxel * k->channels;
}

INLINE int64_t result_of(const chain *k, const cursor *at)
{
    int64_t line = (at->block * at->planes + at->plane) * at->lines + at->line;
    return (line * at->line_tiles + at->chunk * at->tiles_in_chunk) * k->channels;
}

/* Row `block % scale_rows` of a scale, again and again over n elements. */
static void repeat(const float *scale, const chain *k, int64_t block, float *restrict row, int64_t n)
{
    if (!scale)
        return;
    const float *from = scale + block % k->scale_rows * k->channels;
    if (k->channels == 1) {
        float value = *from;
        for (int64_t i = 0; i < n; i++)
            row[i] = value;
        return;
    }
    int64_t done = min_of(k->channels, n);
    memcpy(row, from, 4 * done);
    for (; done < n; done *= 2)
        memcpy(row + done, row, 4 * min_of(done, n - done));
}

/* Room for `count` rows of n elements of 4 bytes each, on lines of the cache. */
INLINE int64_t padded(int64_t n) { return (n + 63) / 16 * 16; }

static float *rooms(int64_t count, int64_t n)
{
    return aligned_alloc(64, (size_t)(count * padded(n) * 4));
}

#endif

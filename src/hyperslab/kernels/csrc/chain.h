/* The chain of normalisation, activation and pooling on one block; see the Python package.
 *
 * The block is (blocks, depth, height, width, channels) in memory: in channels last a sample is a
 * block, in contiguous memory a channel of a sample is one, with one channel. Normalisation is by
 * parts of (scale_rows, channels): mean, scale and shift; block `i` has row `i % scale_rows`. */
#ifndef HYPERSLAB_CHAIN_H
#define HYPERSLAB_CHAIN_H

#include "wide.h"

typedef struct {
    const void *x;
    const void *g; /* gradient of the result */
    void *y;       /* the result; in the backward pass dx */
    uint8_t *bits;
    uint8_t *winners;
    const float *norm;    /* (3, scale_rows, channels): mean, scale, shift */
    const float *through; /* (2, scale_rows, channels): b, c */
    double *sums; /* (parts, 2, scale_rows, channels) */
    int64_t x_type, g_type, y_type;
    int64_t blocks, depth, height, width, channels, scale_rows;
    int64_t pool_depth, pool_height, pool_width, maximum;
    int64_t stream; /* write past the caches */
    double slope;
    int64_t part, parts; /* this call does the part-th of so many */
} chain;

INLINE int activation_of(const chain *k)
{
    return k->slope == 1 ? IDENTITY : k->slope == 0 ? RELU : LEAKY;
}

enum { MEAN, SCALE, SHIFT };
enum { SLOPE, CONSTANT };

/* A run: tiles that are computed together. Either whole lines of tiles, and then each of its
 * `pool_depth` rows is the lines of one plane; or, where lines are long, tiles of one line, and each
 * of its `pool_depth * pool_height` rows is one line. Rows are long, for memory is fast only in
 * order; the loops go over them step by step, with scales of the length of a step, for the first
 * cache is small. */
#define LONGEST 2048   /* elements of a row, about */
#define STEP 2048      /* elements of a step, about */
#define SHORT_STEP 512 /* the same where scales or sums take room beside it */
#define IN_TURN 64     /* elements that have numbers and sums in turn, where they are so few */

typedef struct {
    int64_t block, plane, line, tile;   /* of the result, where it begins */
    int64_t planes, lines, tiles;       /* of a block, of a plane, of a line */
    int64_t lines_of_run, tiles_of_run; /* at most */
    int whole;                          /* lines */
    int64_t left;                       /* runs that this part still has */
    int64_t step;                       /* a multiple of the channels */
    int64_t period;                     /* elements that have numbers and sums of their own */
    int64_t room;                       /* elements of the longest row */
} cursor;

/* Elements whose numbers and sums stay in registers, see `wide.h`; 0 for too many channels. Without
 * such registers, too, sums are of so many: what is added to what does not depend on the processor. */
INLINE int64_t in_registers(int64_t channels) { return IN_TURN % channels == 0 ? IN_TURN : 0; }

#if WIDE
_Static_assert(IN_TURN == 16 * VECTORS, "sums of all builds are of as many elements");
#endif

/* The runs of this part. Parts that write bits must not meet in a byte; where they would the first
 * one does everything. */
static cursor begin(const chain *k)
{
    cursor at = {0};
    int64_t line = k->width * k->channels, tile = k->pool_width * k->channels;
    at.planes = k->depth / k->pool_depth;
    at.lines = k->height / k->pool_height;
    at.tiles = k->width / k->pool_width;
    at.whole = line * k->pool_height <= LONGEST;
    at.lines_of_run = at.whole ? least(at.lines, LONGEST / (line * k->pool_height)) : 1;
    at.tiles_of_run = at.whole ? at.tiles : least(at.tiles, most(LONGEST / tile / 16 * 16, 8));
    at.room = at.whole ? at.lines_of_run * k->pool_height * line : at.tiles_of_run * tile;

    int64_t vectors = 16; /* a step is of whole vectors */
    while (vectors > 1 && k->channels * vectors / 2 % 16 == 0)
        vectors /= 2;
    int64_t few = in_registers(k->channels);
    int64_t step = (k->norm || k->sums) && !(WIDE && few) ? SHORT_STEP : STEP;
    at.step = ratio_up(ratio_up(step, k->channels), vectors) * vectors * k->channels;
    at.period = few ? few : at.step;

    int64_t runs_of_plane = ratio_up(at.lines, at.lines_of_run) * ratio_up(at.tiles, at.tiles_of_run);
    int64_t runs_of_line = ratio_up(at.tiles, at.tiles_of_run);
    int64_t total = k->blocks * at.planes * runs_of_plane;
    int64_t first = total / k->parts * k->part + least(k->part, total % k->parts);
    at.left = total / k->parts + (k->part < total % k->parts);
    int whole_bytes = line % 8 == 0 && at.tiles_of_run * tile % 8 == 0;
    if (k->bits && !whole_bytes) {
        first = 0;
        at.left = k->part == 0 ? total : 0;
    }
    at.tile = first % runs_of_line * at.tiles_of_run;
    at.line = first % runs_of_plane / runs_of_line * at.lines_of_run;
    at.plane = first / runs_of_plane % at.planes;
    at.block = first / runs_of_plane / at.planes;
    return at;
}

INLINE void advance(cursor *at)
{
    at->left--;
    at->tile += at->tiles_of_run;
    if (at->tile < at->tiles)
        return;
    at->tile = 0;
    at->line += at->lines_of_run;
    if (at->line < at->lines)
        return;
    at->line = 0;
    if (++at->plane < at->planes)
        return;
    at->plane = 0;
    at->block++;
}

INLINE int64_t lines_here(const cursor *at) { return least(at->lines_of_run, at->lines - at->line); }
INLINE int64_t tiles_here(const cursor *at) { return least(at->tiles_of_run, at->tiles - at->tile); }

INLINE int64_t rows_of(const chain *k, const cursor *at)
{
    return at->whole ? k->pool_depth : k->pool_depth * k->pool_height;
}

/* Elements of a tile that lie in one row. */
INLINE int64_t tile_in_row(const chain *k, const cursor *at)
{
    return at->whole ? k->pool_height * k->pool_width : k->pool_width;
}

INLINE int64_t results_here(const chain *k, const cursor *at)
{
    return lines_here(at) * tiles_here(at) * k->channels;
}

INLINE int64_t elements_here(const chain *k, const cursor *at)
{
    return results_here(k, at) * tile_in_row(k, at);
}

/* The first element of a row of the run. */
INLINE int64_t row_of(const chain *k, const cursor *at, int64_t row)
{
    int64_t i = at->whole ? row : row / k->pool_height;
    int64_t j = at->whole ? 0 : row % k->pool_height;
    int64_t plane = at->block * k->depth + at->plane * k->pool_depth + i;
    int64_t line = plane * k->height + at->line * k->pool_height + j;
    return (line * k->width + at->tile * k->pool_width) * k->channels;
}

INLINE int64_t result_of(const chain *k, const cursor *at)
{
    int64_t line = (at->block * at->planes + at->plane) * at->lines + at->line;
    return (line * at->tiles + at->tile) * k->channels;
}

/* The first `done` elements again and again over n. */
static void spread_row(float *row, int64_t done, int64_t n)
{
    for (; done < n; done *= 2)
        memcpy(row + done, row, 4 * least(done, n - done));
}

/* Row `block % scale_rows` of a part, again and again over n elements. */
static void repeat(const float *parts, int64_t part, const chain *k, int64_t block,
                   float *restrict row, int64_t n)
{
    if (!parts)
        return;
    const float *from = parts + (part * k->scale_rows + block % k->scale_rows) * k->channels;
    if (k->channels == 1) {
        float value = *from;
        for (int64_t i = 0; i < n; i++)
            row[i] = value;
        return;
    }
    int64_t done = least(k->channels, n);
    memcpy(row, from, 4 * done);
    spread_row(row, done, n);
}

static void repeat_norm(const chain *k, int64_t block, float *m, float *s, float *t, int64_t n)
{
    repeat(k->norm, MEAN, k, block, m, n);
    repeat(k->norm, SCALE, k, block, s, n);
    repeat(k->norm, SHIFT, k, block, t, n);
}

/* Rooms for rows and for steps, each on lines of the cache: `take_room` after `rooms`. */
typedef struct {
    void *all;
    char *next;
} store;

INLINE int64_t padded(int64_t n) { return (4 * n + 255) / 64 * 64; }

static int rooms(store *s, const cursor *at, int64_t rows, int64_t steps)
{
    s->all = aligned_alloc(64, (size_t)(rows * padded(at->room) + steps * padded(at->step)));
    s->next = s->all;
    return s->all == NULL;
}

INLINE void *take_room(store *s, int64_t n)
{
    void *room = s->next;
    s->next += padded(n);
    return room;
}

#endif

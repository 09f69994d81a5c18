/* A linear map along each of three dims: every result is a weighted sum of a few elements.
 *
 * Tensors are (blocks, depth, height, width, channels) in memory, as in windows.c. What a result is
 * made of is told for each dim: its entries, each an element and a weight. Rows along the width
 * are added up first, where they are of depth and height that the result reads; the sum is short
 * enough for the first cache. A weight of zero is multiplied like any other: infinities become NaN
 * where torch makes them so. */
#include "rows.h"

typedef struct {
    const int64_t *begin; /* of the entries of each result; one more: the end */
    const int64_t *source;
    const float *weight;
} sparse_map;

typedef struct {
    const void *x;
    void *y;
    sparse_map maps[3];
    int64_t x_type, y_type;
    int64_t blocks, channels;
    int64_t extents[3], results[3];
    int64_t stream, part, parts;
} resampling;

INLINE float number_at(const void *x, int64_t type, int64_t i)
{
    return type == BFLOAT16 ? from_bfloat16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

/* sum[i] += weight * x[i], or the product alone where it is the first; x is no float16. */
INLINE void add_row(const void *x, int64_t type, float weight, int first, int64_t n,
                    float *restrict sum)
{
    if (first)
        for (int64_t i = 0; i < n; i++)
            sum[i] = weight * number_at(x, type, i);
    else
        for (int64_t i = 0; i < n; i++)
            sum[i] += weight * number_at(x, type, i);
}

/* The rows of the block that a row of results is made of, along depth and height. */
static void sum_rows(const resampling *k, int64_t block, int64_t plane, int64_t line, float *sum,
                     float *room)
{
    const sparse_map *depth = &k->maps[DEPTH], *height = &k->maps[HEIGHT];
    int64_t row = k->extents[WIDTH] * k->channels;
    int first = 1;
    for (int64_t i = depth->begin[plane]; i < depth->begin[plane + 1]; i++)
        for (int64_t j = height->begin[line]; j < height->begin[line + 1]; j++) {
            float weight = depth->weight[i] * height->weight[j];
            int64_t from = (block * k->extents[DEPTH] + depth->source[i]) * k->extents[HEIGHT];
            from = (from + height->source[j]) * row;
            if (k->x_type == BFLOAT16)
                add_row((const uint16_t *)k->x + from, BFLOAT16, weight, first, row, sum);
            else
                add_row(read_row(k->x, k->x_type, from, row, room), FLOAT32, weight, first, row, sum);
            first = 0;
        }
    if (first)
        memset(sum, 0, (size_t)(4 * row));
}

INLINE void along_width(const sparse_map *map, const float *restrict row, int64_t results,
                        int64_t channels, float *restrict y)
{
    for (int64_t o = 0; o < results; o++, y += channels) {
        int64_t i = map->begin[o], end = map->begin[o + 1];
        const float *x = row + (i < end ? map->source[i] : 0) * channels;
        float weight = i < end ? map->weight[i] : 0;
        for (int64_t c = 0; c < channels; c++)
            y[c] = i < end ? weight * x[c] : 0;
        for (i++; i < end; i++) {
            x = row + map->source[i] * channels;
            weight = map->weight[i];
            for (int64_t c = 0; c < channels; c++)
                y[c] += weight * x[c];
        }
    }
}

/* The compiler makes vectors of a few channels where it knows how many. */
static void row_of_results(const resampling *k, const float *row, float *y)
{
    const sparse_map *map = &k->maps[WIDTH];
    int64_t n = k->results[WIDTH];
#define KNOWN(channels)                                                                           \
    case channels:                                                                                \
        along_width(map, row, n, channels, y);                                                    \
        break;
    switch (k->channels) {
        KNOWN(1) KNOWN(4) KNOWN(8) KNOWN(16) KNOWN(32)
    default:
        along_width(map, row, n, k->channels, y);
    }
#undef KNOWN
}

int hyperslab_resample(const resampling *k)
{
    int64_t row = k->results[WIDTH] * k->channels, given = k->extents[WIDTH] * k->channels;
    int64_t room = up_to(most(row, given), 16);
    float *rooms = aligned_alloc(64, (size_t)(4 * room * 4));
    if (!rooms)
        return 1;
    float *sum = rooms, *widened = rooms + room, *result = rooms + 2 * room;
    uint16_t *halves = (uint16_t *)(rooms + 3 * room);
    int64_t total = k->blocks * k->results[DEPTH] * k->results[HEIGHT];
    for (int64_t i = total * k->part / k->parts; i < total * (k->part + 1) / k->parts; i++) {
        int64_t plane = i / k->results[HEIGHT];
        sum_rows(k, plane / k->results[DEPTH], plane % k->results[DEPTH], i % k->results[HEIGHT],
                 sum, widened);
        float *y = row_to_write(k->y, k->y_type, k->stream, i * row, result);
        row_of_results(k, sum, y);
        write_row(k->y, k->y_type, k->stream, i * row, y, row, halves);
    }
    finish_stream(k->stream);
    free(rooms);
    return 0;
}

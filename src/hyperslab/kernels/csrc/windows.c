/* The maximum over windows that may overlap, and its adjoint.
 *
 * Tensors are (blocks, depth, height, width, channels) in memory: in channels last a sample is a
 * block, in contiguous memory a channel of a sample is one, with one channel. A tap is the number of
 * an element in its window, row by row; the winner is the first that is not less than any other, or
 * the last NaN, as in torch. What lies beyond the block never wins. */
#include "windows_wide.h"

static void compete(const float *restrict values, int32_t tap, int64_t n, float *restrict best,
                    int32_t *restrict winner)
{
    for (int64_t i = 0; i < n; i++) {
        float value = values[i], old = best[i];
        int wins = (value > old) | (value != value);
        best[i] = wins ? value : old;
        winner[i] = wins ? tap : winner[i];
    }
}

/* part[i] = row[i * stride] for i < n; nothing beyond row[(n - 1) * stride] is read. */
static void pick(const float *restrict row, int64_t stride, int64_t n, float *restrict part)
{
    int64_t done = 0;
    if (stride == 2) {
        done = n - 1;
        take(row, 0, 2, 1, done, part);
    }
    for (int64_t i = done; i < n; i++)
        part[i] = row[i * stride];
}

/* Where nothing wins, all being -infinity, the first tap within the block does. */
static void start(const windows *k, int32_t row_tap, float *best, int32_t *winner)
{
    for (int64_t o = 0; o < k->results[WIDTH]; o++) {
        int32_t tap = row_tap + (int32_t)larger(0, k->padding[WIDTH] - o * k->stride[WIDTH]);
        for (int64_t c = 0; c < k->channels; c++) {
            best[o * k->channels + c] = -INFINITY;
            winner[o * k->channels + c] = tap;
        }
    }
}

static void row_of_maxima(const windows *k, int64_t block, int64_t plane, int64_t line, float *best,
                          int32_t *winner, float *room, float *part)
{
    int64_t d = plane * k->stride[DEPTH] - k->padding[DEPTH];
    int64_t h = line * k->stride[HEIGHT] - k->padding[HEIGHT];
    int64_t channels = k->channels, row = k->extents[WIDTH] * channels;
    start(k, (int32_t)((larger(0, -d) * k->kernel[HEIGHT] + larger(0, -h)) * k->kernel[WIDTH]), best,
          winner);
    for (int64_t i = larger(0, -d); i < smaller(k->kernel[DEPTH], k->extents[DEPTH] - d); i++)
        for (int64_t j = larger(0, -h); j < smaller(k->kernel[HEIGHT], k->extents[HEIGHT] - h); j++) {
            int64_t first = (block * k->extents[DEPTH] + d + i) * k->extents[HEIGHT] + h + j;
            const float *values = read_row(k->from, k->from_type, first * row, row, room);
            for (int64_t t = 0; t < k->kernel[WIDTH]; t++) {
                int32_t tap = (int32_t)((i * k->kernel[HEIGHT] + j) * k->kernel[WIDTH] + t);
                int64_t lo, hi, stride = k->stride[WIDTH];
                reached(k, WIDTH, t, &lo, &hi);
                if (hi <= lo)
                    continue;
                const float *at = values + (lo * stride + t - k->padding[WIDTH]) * channels;
                float *to = best + lo * channels;
                int32_t *wins = winner + lo * channels;
                if (channels == 1 && stride != 1) {
                    pick(at, stride, hi - lo, part);
                    at = part;
                    stride = 1;
                }
                int64_t count = stride == 1 ? 1 : hi - lo;
                int64_t n = stride == 1 ? (hi - lo) * channels : channels;
                for (int64_t o = 0; o < count; o++)
                    compete(at + o * stride * channels, tap, n, to + o * channels,
                            wins + o * channels);
            }
        }
}

/* Elements of 4 bytes of a row of n, on whole lines of the cache. */
INLINE int64_t lines_of(int64_t n) { return (n + 15) / 16 * 16; }

int hyperslab_window_maximum(const windows *k)
{
    int64_t row = k->results[WIDTH] * k->channels;
    int64_t room = lines_of(larger(row, k->extents[WIDTH] * k->channels));
    float *rooms = aligned_alloc(64, (size_t)(4 * room * 4));
    if (!rooms)
        return 1;
    int32_t *winner = (int32_t *)(rooms + 2 * room);
    int64_t total = k->blocks * k->results[DEPTH] * k->results[HEIGHT];
    for (int64_t i = total * k->part / k->parts; i < total * (k->part + 1) / k->parts; i++) {
        int64_t plane = i / k->results[HEIGHT];
#if WIDE
        if (k->channels % 16 == 0) {
            maxima_in_registers(k, plane / k->results[DEPTH], plane % k->results[DEPTH],
                                i % k->results[HEIGHT]);
            continue;
        }
#endif
        float *best = row_to_write(k->to, k->to_type, 0, i * row, rooms);
        row_of_maxima(k, plane / k->results[DEPTH], plane % k->results[DEPTH],
                      i % k->results[HEIGHT], best, winner, rooms + room,
                      rooms + 3 * room);
        write_row(k->to, k->to_type, 0, i * row, best, row, 0);
        if (k->winners)
            for (int64_t j = 0; j < row; j++)
                k->winners[i * row + j] = (uint8_t)winner[j];
    }
    free(rooms);
    return 0;
}

static void collect(const float *restrict g, const int32_t *restrict winner, int32_t tap, int64_t n,
                    float *restrict sums)
{
    for (int64_t i = 0; i < n; i++)
        sums[i] += winner[i] == tap ? g[i] : 0.0f;
}

/* All results of a row of results, each to the elements of one row of the block. */
static void collect_row(const windows *k, int64_t first, int32_t row_tap, float *sums, float *room,
                        int32_t *winner)
{
    int64_t channels = k->channels, row = k->results[WIDTH] * channels;
    const float *g = read_row(k->from, k->from_type, first, row, room);
    for (int64_t i = 0; i < row; i++)
        winner[i] = k->winners[first + i];
    for (int64_t t = 0; t < k->kernel[WIDTH]; t++) {
        int64_t lo, hi, stride = k->stride[WIDTH];
        reached(k, WIDTH, t, &lo, &hi);
        if (hi <= lo)
            continue;
        int64_t count = stride == 1 ? 1 : hi - lo;
        int64_t n = stride == 1 ? (hi - lo) * channels : channels;
        float *to = sums + (lo * stride + t - k->padding[WIDTH]) * channels;
        for (int64_t o = 0; o < count; o++)
            collect(g + (lo + o) * channels, winner + (lo + o) * channels, row_tap + (int32_t)t, n,
                    to + o * stride * channels);
    }
}

/* Each row of the block collects what is its own: nothing is written twice. */
static int spread_by_rows(const windows *k)
{
    int64_t row = k->extents[WIDTH] * k->channels, of_result = k->results[WIDTH] * k->channels;
    int64_t room = lines_of(larger(row, of_result));
    float *rooms = aligned_alloc(64, (size_t)(3 * room * 4));
    if (!rooms)
        return 1;
    int64_t total = k->blocks * k->extents[DEPTH] * k->extents[HEIGHT];
#if WIDE
    int past_caches = total * row * size_of[k->to_type] >= STREAMED && can_stream(k->to, k->to_type, 0);
#endif
    for (int64_t r = total * k->part / k->parts; r < total * (k->part + 1) / k->parts; r++) {
        int64_t h = r % k->extents[HEIGHT], plane = r / k->extents[HEIGHT];
        int64_t d = plane % k->extents[DEPTH], block = plane / k->extents[DEPTH];
        row_list rows;
        rows.count = 0;
        for (int64_t i = 0; i < k->kernel[DEPTH]; i++)
            for (int64_t j = 0; j < k->kernel[HEIGHT]; j++) {
                int64_t p = d + k->padding[DEPTH] - i, q = h + k->padding[HEIGHT] - j;
                if (p < 0 || q < 0 || p % k->stride[DEPTH] || q % k->stride[HEIGHT])
                    continue;
                p /= k->stride[DEPTH];
                q /= k->stride[HEIGHT];
                if (p >= k->results[DEPTH] || q >= k->results[HEIGHT])
                    continue;
                int64_t line = (block * k->results[DEPTH] + p) * k->results[HEIGHT] + q;
                add_row_to(&rows, line * of_result,
                           (i * k->kernel[HEIGHT] + j) * k->kernel[WIDTH]);
            }
#if WIDE
        if (k->channels % 16 == 0) {
            sums_in_registers(k, &rows, r * row, past_caches);
            continue;
        }
#endif
        float *sums = row_to_write(k->to, k->to_type, 0, r * row, rooms);
        memset(sums, 0, (size_t)(4 * row));
        for (int64_t i = 0; i < rows.count; i++)
            collect_row(k, rows.first[i], rows.tap[i], sums, rooms + room,
                        (int32_t *)(rooms + 2 * room));
        write_row(k->to, k->to_type, 0, r * row, sums, row, 0);
    }
#if WIDE
    finish_stream(past_caches);
#endif
    free(rooms);
    return 0;
}

/* The results of one block with one channel, each to its winner. */
static void scatter(const windows *k, int64_t block, float *sums, float *room)
{
    int64_t height = k->extents[HEIGHT], width = k->extents[WIDTH], row = k->results[WIDTH];
    int64_t offsets[256];
    for (int64_t tap = 0; tap < k->kernel[DEPTH] * k->kernel[HEIGHT] * k->kernel[WIDTH]; tap++) {
        int64_t t = tap % k->kernel[WIDTH], lines = tap / k->kernel[WIDTH];
        offsets[tap] = (lines / k->kernel[HEIGHT] * height + lines % k->kernel[HEIGHT]) * width + t;
    }
    for (int64_t p = 0; p < k->results[DEPTH]; p++)
        for (int64_t q = 0; q < k->results[HEIGHT]; q++) {
            int64_t first = ((block * k->results[DEPTH] + p) * k->results[HEIGHT] + q) * row;
            int64_t d = p * k->stride[DEPTH] - k->padding[DEPTH];
            int64_t h = q * k->stride[HEIGHT] - k->padding[HEIGHT];
            int64_t begin = (d * height + h) * width - k->padding[WIDTH];
            const float *g = read_row(k->from, k->from_type, first, row, room);
            for (int64_t o = 0; o < row; o++)
                sums[begin + o * k->stride[WIDTH] + offsets[k->winners[first + o]]] += g[o];
        }
}

static int spread_by_blocks(const windows *k)
{
    int64_t size = k->extents[DEPTH] * k->extents[HEIGHT] * k->extents[WIDTH];
    int64_t whole = k->to_type == FLOAT32 ? 0 : lines_of(size);
    float *rooms = aligned_alloc(64, (size_t)((whole + lines_of(k->results[WIDTH])) * 4));
    if (!rooms)
        return 1;
    for (int64_t b = k->blocks * k->part / k->parts; b < k->blocks * (k->part + 1) / k->parts; b++) {
        float *sums = row_to_write(k->to, k->to_type, 0, b * size, rooms);
        memset(sums, 0, (size_t)(4 * size));
        scatter(k, b, sums, rooms + whole);
        write_row(k->to, k->to_type, 0, b * size, sums, size, 0);
    }
    free(rooms);
    return 0;
}

int hyperslab_window_spread(const windows *k)
{
    return k->channels == 1 ? spread_by_blocks(k) : spread_by_rows(k);
}

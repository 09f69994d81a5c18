/* The maximum over windows that may overlap, and its adjoint.
 *
 * Tensors are (blocks, depth, height, width, channels) in memory: in channels last a sample is a
 * block, in contiguous memory a channel of a sample is one, with one channel. A tap is the number of
 * an element in its window, row by row; the winner is the first that is not less than any other, or
 * the last NaN, as in torch. What lies beyond the block never wins. */
#include "wide.h"

#include <math.h>

typedef struct {
    const void *from; /* the block; in the backward pass the gradient of the result */
    void *to;         /* the result; in the backward pass that of the block */
    uint8_t *winners; /* of the result; none: 0 */
    int64_t from_type, to_type;
    int64_t blocks, channels;
    int64_t extents[3], results[3], kernel[3], stride[3], padding[3];
    int64_t part, parts;
} windows;

/* The results [lo, hi) along a dim whose tap `t` lies in the block. */
INLINE void reached(const windows *k, int dim, int64_t t, int64_t *lo, int64_t *hi)
{
    int64_t stride = k->stride[dim], before = k->padding[dim] - t;
    int64_t last = k->extents[dim] - 1 + before;
    *lo = before > 0 ? (before + stride - 1) / stride : 0;
    *hi = last < 0 ? 0 : least(last / stride + 1, k->results[dim]);
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

/* The rows that the i-th row of all results is made of. */
static void rows_of_windows(const windows *k, int64_t i, row_list *rows)
{
    int64_t line = i % k->results[HEIGHT], plane = i / k->results[HEIGHT];
    int64_t block = plane / k->results[DEPTH];
    int64_t d = plane % k->results[DEPTH] * k->stride[DEPTH] - k->padding[DEPTH];
    int64_t h = line * k->stride[HEIGHT] - k->padding[HEIGHT];
    rows->count = 0;
    for (int64_t p = most(0, -d); p < least(k->kernel[DEPTH], k->extents[DEPTH] - d); p++)
        for (int64_t q = most(0, -h); q < least(k->kernel[HEIGHT], k->extents[HEIGHT] - h); q++) {
            int64_t row = (block * k->extents[DEPTH] + d + p) * k->extents[HEIGHT] + h + q;
            add_row_to(rows, row * k->extents[WIDTH] * k->channels,
                       (p * k->kernel[HEIGHT] + q) * k->kernel[WIDTH]);
        }
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
        int64_t t = most(0, -column), end = least(k->kernel[WIDTH], k->extents[WIDTH] - column);
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

/* The row of results that begins at `at`; `rows` are of the block. */
static int maxima_in_registers(const windows *k, const row_list *rows, int64_t at)
{
#define CALL(from_type, to_type) maxima_of_types(k, rows, at, from_type, to_type)
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
        int64_t end = least(column / stride + 1, k->results[WIDTH]), c = 0;
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
        int32_t tap = row_tap + (int32_t)most(0, k->padding[WIDTH] - o * k->stride[WIDTH]);
        for (int64_t c = 0; c < k->channels; c++) {
            best[o * k->channels + c] = -INFINITY;
            winner[o * k->channels + c] = tap;
        }
    }
}

static void row_of_maxima(const windows *k, const row_list *rows, float *best, int32_t *winner,
                          float *room, float *part)
{
    int64_t channels = k->channels, row = k->extents[WIDTH] * channels;
    start(k, rows->tap[0], best, winner);
    for (int64_t r = 0; r < rows->count; r++) {
        const float *values = read_row(k->from, k->from_type, rows->first[r], row, room);
        for (int64_t t = 0; t < k->kernel[WIDTH]; t++) {
            int64_t lo, hi, stride = k->stride[WIDTH];
            reached(k, WIDTH, t, &lo, &hi);
            if (hi <= lo)
                continue;
            const float *at = values + (lo * stride + t - k->padding[WIDTH]) * channels;
            float *to = best + lo * channels;
            int32_t *wins = winner + lo * channels, tap = rows->tap[r] + (int32_t)t;
            if (channels == 1 && stride != 1) {
                pick(at, stride, hi - lo, part);
                at = part;
                stride = 1;
            }
            int64_t count = stride == 1 ? 1 : hi - lo;
            int64_t n = stride == 1 ? (hi - lo) * channels : channels;
            for (int64_t o = 0; o < count; o++)
                compete(at + o * stride * channels, tap, n, to + o * channels, wins + o * channels);
        }
    }
}

int hyperslab_window_maximum(const windows *k)
{
    int64_t row = k->results[WIDTH] * k->channels;
    int64_t room = up_to(most(row, k->extents[WIDTH] * k->channels), 16);
    float *rooms = aligned_alloc(64, (size_t)(4 * room * 4));
    if (!rooms)
        return 1;
    int32_t *winner = (int32_t *)(rooms + 2 * room);
    int64_t total = k->blocks * k->results[DEPTH] * k->results[HEIGHT];
    for (int64_t i = total * k->part / k->parts; i < total * (k->part + 1) / k->parts; i++) {
        row_list rows;
        rows_of_windows(k, i, &rows);
#if WIDE
        if (k->channels % 16 == 0) {
            maxima_in_registers(k, &rows, i * row);
            continue;
        }
#endif
        float *best = row_to_write(k->to, k->to_type, 0, i * row, rooms);
        row_of_maxima(k, &rows, best, winner, rooms + room, rooms + 3 * room);
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
    int64_t room = up_to(most(row, of_result), 16);
    float *rooms = aligned_alloc(64, (size_t)(3 * room * 4));
    if (!rooms)
        return 1;
    int64_t total = k->blocks * k->extents[DEPTH] * k->extents[HEIGHT];
    int past_caches = 0;
#if WIDE
    past_caches = total * row * size_of[k->to_type] >= STREAMED && can_stream(k->to, k->to_type, 0);
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
    finish_stream(past_caches);
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
    int64_t whole = k->to_type == FLOAT32 ? 0 : up_to(size, 16);
    float *rooms = aligned_alloc(64, (size_t)((whole + up_to(k->results[WIDTH], 16)) * 4));
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

/* From contiguous memory to channels last and back: a transposition of every sample. */
#include "wide.h"

typedef struct {
    const void *x;
    void *y;
    int64_t x_type, y_type;
    int64_t samples, channels, voxels;
    int64_t sample, channel; /* elements from each to the next of an x in contiguous memory */
    int64_t to_last;         /* from (channels, voxels) to (voxels, channels), else back */
    int64_t stream, part, parts;
} reordering;

#define SIDE 16

/* y[j * y_stride + i] = x[i * x_stride + j] for i < lanes, j < count; SIDE by SIDE are read. */
static void turn(const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t count,
                 int64_t lanes)
{
#if WIDE
    __m512 r[16], q[16];
    for (int i = 0; i < 16; i++)
        r[i] = _mm512_loadu_ps(x + i * x_stride);
    for (int i = 0; i < 16; i += 2) {
        q[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        q[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(q[i], q[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(q[i], q[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(q[i + 1], q[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(q[i + 1], q[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        __m512 a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        __m512 b = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        __m512 c = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        __m512 d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        q[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        q[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
        q[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
        q[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
    __mmask16 mask = (__mmask16)(0xffff >> (SIDE - lanes));
    for (int64_t j = 0; j < count; j++)
        _mm512_mask_storeu_ps(y + j * y_stride, mask, q[j]);
#else
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < lanes; i++)
            y[j * y_stride + i] = x[i * x_stride + j];
#endif
}

#define CHANNELS 64 /* at once: a multiple of SIDE */
#define VOXELS 128

/* Rows and results of one tile, each with room for what `turn` touches beyond. */
typedef struct {
    float rows[CHANNELS * (VOXELS + SIDE)];
    float turned[CHANNELS * (VOXELS + SIDE)];
    uint16_t halves[CHANNELS * VOXELS];
} tile_room;

static void copy_in(const reordering *k, int64_t first, int64_t n, float *row)
{
    const float *x = read_row(k->x, k->x_type, first, n, row);
    if (x != row)
        memcpy(row, x, 4 * n);
}

static void copy_out(const reordering *k, int64_t first, int64_t n, const float *row, tile_room *r)
{
    float *y = row_to_write(k->y, k->y_type, k->stream, first, NULL);
    if (y)
        memcpy(y, row, 4 * n);
    write_row(k->y, k->y_type, k->stream, first, row, n, r->halves);
}

static void tile_to_last(const reordering *k, int64_t sample, int64_t channel, int64_t channels,
                         int64_t voxel, int64_t voxels, tile_room *r)
{
    int64_t base = sample * k->channels * k->voxels, stride = VOXELS + SIDE;
    for (int64_t c = 0; c < channels; c++)
        copy_in(k, sample * k->sample + (channel + c) * k->channel + voxel, voxels, r->rows + c * stride);
    for (int64_t v = 0; v < up_to(voxels, SIDE); v += SIDE)
        for (int64_t c = 0; c < up_to(channels, SIDE); c += SIDE)
            turn(r->rows + c * stride + v, stride, r->turned + v * channels + c, channels,
                 least(SIDE, voxels - v), least(SIDE, channels - c));
    if (channels == k->channels) {
        copy_out(k, base + voxel * channels, voxels * channels, r->turned, r);
        return;
    }
    for (int64_t v = 0; v < voxels; v++)
        copy_out(k, base + (voxel + v) * k->channels + channel, channels, r->turned + v * channels, r);
}

static void tile_to_first(const reordering *k, int64_t sample, int64_t channel, int64_t channels,
                          int64_t voxel, int64_t voxels, tile_room *r)
{
    int64_t base = sample * k->channels * k->voxels, stride = VOXELS + SIDE;
    if (channels == k->channels)
        copy_in(k, base + voxel * channels, voxels * channels, r->rows);
    else
        for (int64_t v = 0; v < voxels; v++)
            copy_in(k, base + (voxel + v) * k->channels + channel, channels, r->rows + v * channels);
    for (int64_t c = 0; c < channels; c += SIDE)
        for (int64_t v = 0; v < up_to(voxels, SIDE); v += SIDE)
            turn(r->rows + v * channels + c, channels, r->turned + c * stride + v, stride,
                 least(SIDE, channels - c), SIDE);
    for (int64_t c = 0; c < channels; c++)
        copy_out(k, base + (channel + c) * k->voxels + voxel, voxels, r->turned + c * stride, r);
}

#if WIDE
/* Four channels side by side, sixteen voxels at a time, without a stop in the cache: what a network
 * for universes or for scans of four kinds reads first. Returns how many voxels it did. */
INLINE int64_t four_to_last(const float *x, int64_t stride, void *y, int64_t y_type, int64_t first,
                            int64_t voxels, int past_caches)
{
    int64_t v = 0;
    for (; v + 16 <= voxels; v += 16) {
        __m512 c[4], pair[4];
        for (int i = 0; i < 4; i++)
            c[i] = _mm512_loadu_ps(x + i * stride + v);
        pair[0] = _mm512_unpacklo_ps(c[0], c[1]);
        pair[1] = _mm512_unpackhi_ps(c[0], c[1]);
        pair[2] = _mm512_unpacklo_ps(c[2], c[3]);
        pair[3] = _mm512_unpackhi_ps(c[2], c[3]);
        /* Voxels i, i + 4, i + 8, i + 12 in q[i]: a quarter each. */
        __m512 q[4] = {_mm512_shuffle_ps(pair[0], pair[2], 0x44),
                       _mm512_shuffle_ps(pair[0], pair[2], 0xee),
                       _mm512_shuffle_ps(pair[1], pair[3], 0x44),
                       _mm512_shuffle_ps(pair[1], pair[3], 0xee)};
        __m512 low = _mm512_shuffle_f32x4(q[0], q[1], 0x44), low2 = _mm512_shuffle_f32x4(q[2], q[3], 0x44);
        __m512 high = _mm512_shuffle_f32x4(q[0], q[1], 0xee), high2 = _mm512_shuffle_f32x4(q[2], q[3], 0xee);
        store_wide(y, y_type, first + 4 * v, _mm512_shuffle_f32x4(low, low2, 0x88), past_caches);
        store_wide(y, y_type, first + 4 * v + 16, _mm512_shuffle_f32x4(low, low2, 0xdd), past_caches);
        store_wide(y, y_type, first + 4 * v + 32, _mm512_shuffle_f32x4(high, high2, 0x88), past_caches);
        store_wide(y, y_type, first + 4 * v + 48, _mm512_shuffle_f32x4(high, high2, 0xdd), past_caches);
    }
    return v;
}

static int64_t four_channels(const reordering *k, int64_t sample, int64_t voxel, int64_t voxels)
{
    int64_t first = 4 * (sample * k->voxels + voxel);
    const float *x = (const float *)k->x + sample * k->sample + voxel;
    int past_caches = k->stream && can_stream(k->y, k->y_type, first);
    if (k->y_type == BFLOAT16)
        return four_to_last(x, k->channel, k->y, BFLOAT16, first, voxels, past_caches);
    return four_to_last(x, k->channel, k->y, k->y_type, first, voxels, past_caches);
}
#endif

int hyperslab_reorder(const reordering *k)
{
    int64_t tall = ratio_up(k->channels, CHANNELS), wide = ratio_up(k->voxels, VOXELS);
    int64_t total = k->samples * tall * wide;
    int64_t first = total * k->part / k->parts, last = total * (k->part + 1) / k->parts;
    tile_room *r = aligned_alloc(64, (size_t)up_to(sizeof(tile_room), 64));
    if (!r)
        return 1;
    for (int64_t i = first; i < last; i++) {
        int64_t channel = i % tall * CHANNELS, voxel = i / tall % wide * VOXELS;
        int64_t channels = least(CHANNELS, k->channels - channel);
        int64_t voxels = least(VOXELS, k->voxels - voxel), done = 0;
#if WIDE
        if (k->to_last && k->channels == 4 && k->x_type == FLOAT32)
            done = four_channels(k, i / tall / wide, voxel, voxels);
#endif
        if (k->to_last && done < voxels)
            tile_to_last(k, i / tall / wide, channel, channels, voxel + done, voxels - done, r);
        if (!k->to_last)
            tile_to_first(k, i / tall / wide, channel, channels, voxel, voxels, r);
    }
    finish_stream(k->stream);
    free(r);
    return 0;
}

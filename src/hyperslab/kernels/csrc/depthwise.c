/* The weight's gradient of a convolution of every channel by itself, with windows in steps of one.
 *
 * dw[t] is the sum over voxels v of g[v] x[v + dilation t - padding]. As many channels as a vector has
 * are worked on at a time; of them the planes that one plane of g meets lie in a ring, in float32 and
 * with zeros for their padding, so that no loop asks where the volume ends. */
#include "vectors.h"

/* Volumes (samples, depth, height, width, channels) of float32 or bfloat16. */
typedef struct {
    const void *x, *g;
    float *weight; /* (channels, taps) */
    int64_t type, samples, channels;
    int64_t extents[3], results[3], kernel[3], padding[3], dilation[3];
    int64_t part, parts;
} depthwise;

#if VECTORS

enum {
    ABREAST = 8,    /* taps of a row whose sums are in registers */
    PASSED = 1 << 9 /* voxels after which float32 becomes float64: no sum is one of too many */
};

typedef struct {
    const depthwise *k;
    int64_t width, height, planes; /* of the ring, padding included */
    float *ring, *gradient;        /* planes of x; one plane of g */
    double *sums;                  /* by tap and channel */
} room;

/* Plane z of a volume's sample, channels [first, first + LANES), into a larger one of zeros. */
static void read_plane(const depthwise *k, const void *from, const int64_t *extents, int64_t sample,
                       int64_t z, int64_t first, const int64_t *padding, int64_t width, float *plane)
{
    int64_t channels = least(LANES, k->channels - first);
    for (int64_t y = 0; y < extents[HEIGHT]; y++) {
        int64_t at = ((sample * extents[DEPTH] + z) * extents[HEIGHT] + y) * extents[WIDTH];
        float *row = plane + ((y + padding[HEIGHT]) * width + padding[WIDTH]) * LANES;
        for (int64_t x = 0; x < extents[WIDTH]; x++)
            store(row + x * LANES, some_of(from, k->type, (at + x) * k->channels + first, channels));
    }
}

/* What rows [y, end), columns [left, right) bring to `taps` neighbouring taps of a row of the kernel. */
INLINE void add_taps(const room *r, const float *plane, int64_t y, int64_t end, int64_t left,
                     int64_t right, int64_t step, int taps, double *sums)
{
    vector s[ABREAST];
    float some[LANES] __attribute__((aligned(64)));
#pragma GCC unroll 8
    for (int i = 0; i < taps; i++)
        s[i] = zero();
    for (; y < end; y++) {
        const float *g = r->gradient + y * r->k->results[WIDTH] * LANES;
        const float *row = plane + y * r->width * LANES;
        for (int64_t x = left; x < right; x++) {
            vector of_g = load(g + x * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < taps; i++)
                s[i] = add_products(s[i], of_g, load(row + (x + i * step) * LANES));
        }
    }
    for (int i = 0; i < taps; i++, sums += LANES) {
        store(some, s[i]);
        for (int c = 0; c < LANES; c++)
            sums[c] += (double)some[c];
    }
}

static void add_some_taps(const room *r, const float *plane, int64_t y, int64_t end, int64_t left,
                          int64_t right, int64_t step, int64_t taps, double *sums)
{
    switch (taps) {
    case 1: add_taps(r, plane, y, end, left, right, step, 1, sums); break;
    case 2: add_taps(r, plane, y, end, left, right, step, 2, sums); break;
    case 3: add_taps(r, plane, y, end, left, right, step, 3, sums); break;
    case 4: add_taps(r, plane, y, end, left, right, step, 4, sums); break;
    case 5: add_taps(r, plane, y, end, left, right, step, 5, sums); break;
    case 6: add_taps(r, plane, y, end, left, right, step, 6, sums); break;
    case 7: add_taps(r, plane, y, end, left, right, step, 7, sums); break;
    default: add_taps(r, plane, y, end, left, right, step, ABREAST, sums);
    }
}

/* All taps of one plane of the kernel, which lies on a plane of the ring. */
static void add_plane(const room *r, const float *plane, double *sums)
{
    const depthwise *k = r->k;
    int64_t rows = most(1, PASSED / k->results[WIDTH]), step = k->dilation[WIDTH];
    for (int64_t y = 0; y < k->results[HEIGHT]; y += rows)
        for (int64_t left = 0; left < k->results[WIDTH]; left += PASSED) {
            int64_t end = least(y + rows, k->results[HEIGHT]);
            int64_t right = least(left + PASSED, k->results[WIDTH]);
            for (int64_t i = 0; i < k->kernel[HEIGHT]; i++)
                for (int64_t j = 0; j < k->kernel[WIDTH]; j += ABREAST) {
                    int64_t at = i * k->dilation[HEIGHT] * r->width + j * step;
                    add_some_taps(r, plane + at * LANES, y, end, left, right, step,
                                  least(ABREAST, k->kernel[WIDTH] - j),
                                  sums + (i * k->kernel[WIDTH] + j) * LANES);
                }
        }
}

static void sum_channels(const room *r, int64_t first)
{
    const depthwise *k = r->k;
    const int64_t none[3] = {0, 0, 0};
    int64_t size = r->height * r->width * LANES, taps = k->kernel[HEIGHT] * k->kernel[WIDTH];
    memset(r->sums, 0, (size_t)(8 * k->kernel[DEPTH] * taps * LANES));
    for (int64_t sample = 0; sample < k->samples; sample++) {
        int64_t read = 0; /* planes of x, from the first */
        for (int64_t z = 0; z < k->results[DEPTH]; z++) {
            int64_t reach = z - k->padding[DEPTH] + (k->kernel[DEPTH] - 1) * k->dilation[DEPTH];
            for (; read < k->extents[DEPTH] && read <= reach; read++)
                read_plane(k, k->x, k->extents, sample, read, first, k->padding, r->width,
                           r->ring + read % r->planes * size);
            read_plane(k, k->g, k->results, sample, z, first, none, k->results[WIDTH], r->gradient);
            for (int64_t i = 0; i < k->kernel[DEPTH]; i++) {
                int64_t at = z - k->padding[DEPTH] + i * k->dilation[DEPTH];
                if (at >= 0 && at < k->extents[DEPTH])
                    add_plane(r, r->ring + at % r->planes * size, r->sums + i * taps * LANES);
            }
        }
    }
    taps *= k->kernel[DEPTH];
    for (int64_t c = 0; c < least(LANES, k->channels - first); c++)
        for (int64_t tap = 0; tap < taps; tap++)
            k->weight[(first + c) * taps + tap] = (float)r->sums[tap * LANES + c];
}

int hyperslab_depthwise_gradient(const depthwise *k)
{
    memory all = {0};
    room r = {.k = k};
    r.height = k->extents[HEIGHT] + 2 * k->padding[HEIGHT];
    r.width = k->extents[WIDTH] + 2 * k->padding[WIDTH];
    r.planes = least((k->kernel[DEPTH] - 1) * k->dilation[DEPTH] + 1, k->extents[DEPTH]);
    r.ring = zeros(&all, 4 * r.planes * r.height * r.width * LANES);
    r.gradient = zeros(&all, 4 * k->results[HEIGHT] * k->results[WIDTH] * LANES);
    r.sums = zeros(&all, 8 * k->kernel[DEPTH] * k->kernel[HEIGHT] * k->kernel[WIDTH] * LANES);
    if (!all.failed)
        for (int64_t first = k->part * LANES; first < k->channels; first += k->parts * LANES)
            sum_channels(&r, first);
    free_rooms(&all);
    return all.failed;
}

#endif

/* Sums over the block for each channel, forward and backward, each in one pass. */
#include "gradient.h"

#include <math.h>

static void accumulate(double *restrict sum, double *restrict product, const float *restrict du,
                       const float *restrict x, const float *restrict m, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        sum[i] += (double)du[i];
        product[i] += (double)du[i] * (double)(x[i] - m[i]);
    }
}

static void accumulate_around(double *restrict sum, double *restrict square,
                              const float *restrict x, const float *restrict pivot, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double d = (double)x[i] - (double)pivot[i];
        sum[i] += d;
        square[i] = fma(d, d, square[i]); /* as the wide registers do it */
    }
}

/* What no vector holds of a row: elements of a step, the first of which is number `lane`. */
static void sum_rest(const chain *k, const cursor *at, const gradient_rooms *r, const place *p,
                     int64_t lane)
{
    int64_t n = p->n - lane;
    double *sum = r->sum + lane, *product = r->product + lane;
    const float *x = read_row(k->x, k->x_type, p->from + lane, n, r->loaded);
    if (!p->g) {
        accumulate_around(sum, product, x, r->m + lane, n);
        return;
    }
    const float *du = gradient_from(k, at, r, p, lane, x);
    accumulate(sum, product, du, x, r->m + lane, n);
}

static void sum_row(const chain *k, const cursor *at, const gradient_rooms *r, const source *g,
                    int64_t row)
{
    int64_t n = elements_here(k, at), from = row_of(k, at, row), done = 0;
#if WIDE
    place whole = {row, 0, from, n, g};
    gradient_step w = wide_step(k, at, r, &whole);
    w.sum = r->sum;
    w.product = r->product;
    done = g ? sums_wide_any(&w, n, known_by(k)) : around_wide(&w, n);
#endif
    while (done < n) {
        int64_t lane = done % at->period, begin = done - lane;
        place p = {row, begin, from + begin, least(at->period, n - begin), g};
        sum_rest(k, at, r, &p, lane);
        done = begin + p.n;
    }
}

/* A value of every channel, around which squares are added up: those of values far from zero would
 * leave nothing of their differences. */
static void take_pivot(const chain *k, const cursor *at, const gradient_rooms *r, int64_t n)
{
    const float *x = read_row(k->x, k->x_type, row_of(k, at, 0), k->channels, r->loaded);
    for (int64_t c = 0; c < k->channels; c++)
        r->m[c] = isfinite(x[c]) ? x[c] : 0;
    spread_row(r->m, k->channels, n);
}

/* The sums of every channel in front: half of what there is to the other half, as long as it is even. */
static void add_up(double *sums, int64_t channels, int64_t n)
{
    while (n % (2 * channels) == 0) {
        n /= 2;
        for (int64_t i = 0; i < n; i++)
            sums[i] += sums[n + i];
    }
    for (int64_t i = channels; i < n; i += channels)
        for (int64_t c = 0; c < channels; c++)
            sums[c] += sums[i + c];
}

/* Add the sums of a step's elements to those of its channels, and begin again. */
static void flush(const chain *k, int64_t block, const gradient_rooms *r, int64_t values, int64_t n)
{
    int64_t parts = k->g ? 2 : 3, channels = k->channels, count = k->scale_rows * channels;
    double *to = k->sums + parts * count * k->part + block % k->scale_rows * channels;
    add_up(r->sum, channels, n);
    add_up(r->product, channels, n);
    for (int64_t c = 0; c < channels; c++) {
        double sum = r->sum[c], product = r->product[c];
        if (k->g) {
            to[c] += sum;
            to[count + c] += product;
        } else {
            double total = sum + (double)values * (double)r->m[c];
            to[c] += total;
            to[count + c] += total * total / (double)values;
            to[2 * count + c] += product - sum * sum / (double)values;
        }
    }
    memset(r->sum, 0, 8 * n);
    memset(r->product, 0, 8 * n);
}

/* Sums of du and du * (x - mean) of a part; without g those of `channel_sums`. */
int hyperslab_chain_sums(const chain *k)
{
    int64_t sums = (k->g ? 2 : 3) * k->scale_rows * k->channels;
    memset(k->sums + sums * k->part, 0, 8 * sums);
    cursor at = begin(k);
    if (at.left == 0)
        return 0;
    store all;
    gradient_rooms r;
    if (prepare(&all, &r, k, &at, 4))
        return 1;
    int64_t step = least(at.period, at.room), block = -1, values = 0;
    r.sum = take_room(&all, 2 * at.step);
    r.product = take_room(&all, 2 * at.step);
    memset(r.sum, 0, 8 * step);
    memset(r.product, 0, 8 * step);
    for (; at.left; advance(&at)) {
        if (block < 0 || (at.block != block && k->scale_rows > 1)) {
            if (block >= 0)
                flush(k, block, &r, values, step);
            if (k->g)
                repeat_norm(k, at.block, r.m, r.s, r.t, step);
            else
                take_pivot(k, &at, &r, step);
            values = 0;
        }
        block = at.block;
        values += elements_here(k, &at) / k->channels * rows_of(k, &at);
        source g = {0};
        if (k->g)
            g = spread_gradient(k, &at, &r);
        for (int64_t row = 0; row < rows_of(k, &at); row++)
            sum_row(k, &at, &r, k->g ? &g : NULL, row);
    }
    flush(k, block, &r, values, step);
    free(all.all);
    return 0;
}

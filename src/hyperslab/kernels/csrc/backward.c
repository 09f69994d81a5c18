/* The gradient of a chain's input, in one pass over the block. */
#include "cubes.h"
#include "gradient.h"

static void scale_row(float *restrict dx, const float *restrict du, const float *restrict s,
                      int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dx[i] = du[i] * s[i];
}

static void combine_rows(float *restrict dx, const float *restrict du, const float *restrict s,
                         const float *restrict x, const float *restrict m, const float *restrict b,
                         const float *restrict c, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dx[i] = du[i] * s[i] + (x[i] - m[i]) * b[i] + c[i];
}

/* One row of a run. */
static void write_gradient(const chain *k, const cursor *at, const gradient_rooms *r, const source *g,
                           int64_t row, const float *b, const float *c, float *out, uint16_t *halves)
{
    int64_t n = elements_here(k, at), from = row_of(k, at, row);
    for (int64_t i = 0; i < n; i += at->step) {
        place p = {row, i, from + i, least(at->step, n - i), g};
        int64_t done = 0;
#if WIDE
        gradient_step w = wide_step(k, at, r, &p);
        w.target = k->y;
        w.y_type = k->y_type;
        w.stream = k->stream;
        w.first_y = p.from;
        w.b = b;
        w.c = c;
        done = gradient_wide_any(&w, p.n, known_by(k), k->through ? COMBINED : k->norm ? SCALED : PLAIN);
#endif
        int64_t first = p.from + done, rest = p.n - done;
        if (rest == 0)
            continue;
        const float *x = k->x ? read_row(k->x, k->x_type, first, rest, r->loaded) : NULL;
        const float *du = gradient_from(k, at, r, &p, done, x);
        float *dx = row_to_write(k->y, k->y_type, k->stream, first, out);
        const float *result = dx;
        if (k->through)
            combine_rows(dx, du, r->s + done, x, r->m + done, b + done, c + done, rest);
        else if (k->norm)
            scale_row(dx, du, r->s + done, rest);
        else if (dx == out)
            result = du;
        else
            memcpy(dx, du, 4 * rest);
        write_row(k->y, k->y_type, k->stream, first, result, rest, halves);
    }
}

int hyperslab_chain_backward(const chain *k)
{
    cursor at = begin(k);
    if (at.left == 0)
        return 0;
    store all;
    gradient_rooms r;
    if (prepare(&all, &r, k, &at, 4))
        return 1;
    int64_t step = least(at.step, at.room);
    float *b = take_room(&all, at.step), *c = take_room(&all, at.step);
    float *out = take_room(&all, at.step);
    uint16_t *halves = take_room(&all, at.step);
    for (int64_t block = -1; at.left; advance(&at)) {
        if (block < 0 || (at.block != block && k->scale_rows > 1)) {
            repeat_norm(k, at.block, r.m, r.s, r.t, step);
            repeat(k->through, SLOPE, k, at.block, b, step);
            repeat(k->through, CONSTANT, k, at.block, c, step);
        }
        block = at.block;
#if WIDE
        if (spread_cubes(k, &at))
            continue;
#endif
        source g = spread_gradient(k, &at, &r);
        for (int64_t row = 0; row < rows_of(k, &at); row++)
            write_gradient(k, &at, &r, &g, row, b, c, out, halves);
    }
    finish_stream(k->stream);
    free(all.all);
    return 0;
}

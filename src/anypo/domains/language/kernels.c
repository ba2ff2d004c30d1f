/* What PyTorch's kernels leave undone for language models on a processor with AVX-512: one decoding step of a Llama-type layer for few rows, its weights
   read at the rate at which memory gives them, and the gate of its training pass. All numbers are float32 but for matrices, which may be bfloat16.

   Weights lie in panels of 16 outputs, [outputs/16][D][16], so that each thread reads one stream; rows lie side by side, [D][16], so that one weight
   vector meets all of them while it is in a register. Each output is one chain of multiply-adds in the order of d, whatever the number of rows.
   What lies between two products is done by the same threads, which spares a call for each norm, rotation, activation and sum. */

#include <math.h>

#define LANES 16
#define AHEAD 4096 /* bytes between what is multiplied and what is fetched from memory */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int places __attribute__((vector_size(4 * LANES), aligned(4)));
typedef unsigned short half; /* bfloat16: the upper half of a float32 */
typedef half halves __attribute__((vector_size(2 * LANES), aligned(2)));

/* A matrix in panels of float32, or of bfloat16 where `narrow`. `bias` may be null. */
typedef struct { const void *panels; const float *bias; long inputs, outputs, narrow; } matrix;
typedef struct { const float *weight; float eps; } norm; /* `weight` may be null: no norm */

static long tile(long rows, long t) { return rows - t * LANES < LANES ? rows - t * LANES : LANES; }
static long tiles(long rows) { return (rows + LANES - 1) / LANES; }

/* to[d][r] = from[r][d] for 16 rows of `stride` numbers and 16 columns: halves, quarters, pairs and neighbours change places. */
#define EXCHANGE(S, LOW, HIGH)                                                 \
    _Pragma("GCC unroll 16") for (int r = 0; r < LANES; r++) if (!(r & S)) {   \
        lanes low = __builtin_shuffle(line[r], line[r + S], (places)LOW);      \
        line[r + S] = __builtin_shuffle(line[r], line[r + S], (places)HIGH);   \
        line[r] = low;                                                         \
    }
#define PLACES(...) {__VA_ARGS__}
static inline __attribute__((always_inline)) void square(const float *from, long stride, float *to) {
    lanes line[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) line[r] = *(const lanes *)(from + r * stride);
    EXCHANGE(8, PLACES(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), PLACES(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    EXCHANGE(4, PLACES(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), PLACES(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    EXCHANGE(2, PLACES(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), PLACES(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    EXCHANGE(1, PLACES(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), PLACES(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#pragma GCC unroll 16
    for (int d = 0; d < LANES; d++) *(lanes *)(to + d * LANES) = line[d];
}

/* to[d][r] = from[r][d] for columns `first` to `last` of `rows` <= 16 rows of D numbers, the missing rows zero. */
static void side_by_side(const float *from, long rows, long D, long first, long last, float *to) {
    long d = first;
    if (rows == LANES)
        for (; d + LANES <= last; d += LANES) square(from + d, D, to + d * LANES);
    for (; d < last; d++)
        for (long r = 0; r < LANES; r++) to[d * LANES + r] = r < rows ? from[r * D + d] : 0;
}

/* w [E][D] -> panels [ceil(E/16)][D][16], the last one filled up with zeros. */
void anypo_pack(const float *w, float *panels, long D, long E) {
#pragma omp parallel for schedule(static)
    for (long p = 0; p < tiles(E); p++) side_by_side(w + p * LANES * D, tile(E, p), D, 0, D, panels + p * D * LANES);
}

void anypo_pack_narrow(const half *w, half *panels, long D, long E) {
#pragma omp parallel for schedule(static)
    for (long p = 0; p < tiles(E); p++) {
        const half *from = w + p * LANES * D;
        half *to = panels + p * D * LANES;
        long rows = tile(E, p);
        for (long first = 0; first < D; first += LANES) /* a square at a time, so that whole cache lines are read and written */
            for (long r = 0; r < LANES; r++)
                for (long d = first; d < first + tile(D, first / LANES); d++) to[d * LANES + r] = r < rows ? from[r * D + d] : 0;
    }
}

/* All threads: x [n][D] -> space [ceil(n/16)][D][16]. */
static void lay_out(const float *x, long n, long D, float *space) {
    long pieces = tiles(D);
#pragma omp for schedule(static)
    for (long i = 0; i < tiles(n) * pieces; i++) {
        long t = i / pieces, first = i % pieces * LANES;
        side_by_side(x + t * LANES * D, tile(n, t), D, first, first + tile(D, i % pieces), space + t * D * LANES);
    }
}

static inline lanes widened(halves v) { return (lanes)(__builtin_convertvector(v, places) << 16); }

/* 16 outputs of up to `rows` rows; `rows` and `narrow` are constants where this is inlined: the sums stay in registers. */
static inline __attribute__((always_inline)) void panel(const int rows, const int narrow, const float *side, const void *w, long D, lanes *out) {
    lanes sum[LANES];
    for (int r = 0; r < rows; r++) sum[r] = (lanes){0};
#pragma GCC unroll 4
    for (long d = 0; d < D; d++) {
        const void *here = narrow ? (const void *)((const half *)w + d * LANES) : (const void *)((const float *)w + d * LANES);
        lanes weight = narrow ? widened(*(const halves *)here) : *(const lanes *)here;
        __builtin_prefetch((const char *)here + AHEAD, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) sum[r] += side[d * LANES + r] * weight;
    }
    for (int r = 0; r < rows; r++) out[r] = sum[r];
}

static void panel_of(const matrix *m, long p, const float *side, long rows, lanes *sum) {
    long D = m->inputs;
    const void *w = m->narrow ? (const void *)((const half *)m->panels + p * D * LANES) : (const void *)((const float *)m->panels + p * D * LANES);
    if (m->narrow) {
        if (rows <= 4) panel(4, 1, side, w, D, sum);
        else if (rows <= 8) panel(8, 1, side, w, D, sum);
        else panel(LANES, 1, side, w, D, sum);
    } else {
        if (rows <= 4) panel(4, 0, side, w, D, sum);
        else if (rows <= 8) panel(8, 0, side, w, D, sum);
        else panel(LANES, 0, side, w, D, sum);
    }
}

static inline lanes fetch(const float *from, long count) {
    lanes value = {0};
    if (count == LANES) return *(const lanes *)from;
    for (long e = 0; e < count; e++) value[e] = from[e];
    return value;
}

static inline void store(lanes value, float *to, long count) {
    if (count == LANES) *(lanes *)to = value;
    else
        for (long e = 0; e < count; e++) to[e] = value[e];
}

/* All threads: y [n][E] = m x + bias for the rows in `space`, or that added to y. */
static void multiply(const matrix *m, const float *space, long n, float *y, int add) {
#pragma omp for schedule(static)
    for (long p = 0; p < tiles(m->outputs); p++)
        for (long t = 0; t < tiles(n); t++) {
            lanes sum[LANES];
            long rows = tile(n, t), count = tile(m->outputs, p);
            lanes bias = m->bias ? fetch(m->bias + p * LANES, count) : (lanes){0};
            panel_of(m, p, space + t * m->inputs * LANES, rows, sum);
            for (long r = 0; r < rows; r++) {
                float *out = y + (t * LANES + r) * m->outputs + p * LANES;
                store(sum[r] + bias + (add ? fetch(out, count) : (lanes){0}), out, count);
            }
        }
}

static inline lanes choose(places where, lanes yes, lanes no) { return (lanes)(((places)yes & where) | ((places)no & ~where)); }

/* e^x to about 2 units in the last place: 2^k times the series of the rest; beyond +-87 as at 87. */
static inline lanes exponential(lanes x) {
    const lanes most = (lanes){0} + 87.0f;
    x = choose(x > most, most, x);
    x = choose(x < -most, -most, x);
    const float shifter = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    lanes whole = x * 1.44269504f + shifter;
    places power = (places)whole << 23;
    whole -= shifter;
    lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes value = rest * 1.98412698e-4f + 1.38888889e-3f;
    value = value * rest + 8.33333333e-3f;
    value = value * rest + 4.16666667e-2f;
    value = value * rest + 1.66666667e-1f;
    value = value * rest + 0.5f;
    value = value * rest + 1.0f;
    value = value * rest + 1.0f;
    return (lanes)((places)value + power);
}

/* All threads: y [n][E] = silu(gate x) * (up x) for the rows in `space`. */
static void gated(const matrix *gate, const matrix *up, const float *space, long n, float *y) {
#pragma omp for schedule(static)
    for (long p = 0; p < tiles(gate->outputs); p++)
        for (long t = 0; t < tiles(n); t++) {
            lanes open[LANES], sum[LANES];
            long rows = tile(n, t);
            panel_of(gate, p, space + t * gate->inputs * LANES, rows, open);
            panel_of(up, p, space + t * up->inputs * LANES, rows, sum);
            for (long r = 0; r < rows; r++)
                store(sum[r] * open[r] / (1 + exponential(-open[r])), y + (t * LANES + r) * gate->outputs + p * LANES, tile(gate->outputs, p));
        }
}

/* out = x / sqrt(mean(x^2) + eps) * weight, for one row of D numbers. */
static void normalize(const float *x, norm by, long D, float *out) {
    float square_sum = 0;
#pragma omp simd reduction(+ : square_sum)
    for (long d = 0; d < D; d++) square_sum += x[d] * x[d];
    float inverse = 1 / sqrtf(square_sum / D + by.eps);
    for (long d = 0; d < D; d++) out[d] = x[d] * inverse * by.weight[d];
}

/* All threads: the norm of every row, and the rows of it side by side in `space`. */
static void normalize_rows(const float *x, norm by, long n, long D, float *out, float *space) {
#pragma omp for schedule(static)
    for (long r = 0; r < n; r++) normalize(x + r * D, by, D, out + r * D);
    lay_out(out, n, D, space);
}

/* Rotary position embedding of one head of W numbers, in place: the two halves are the coordinates of W/2 points. */
static void rotate(float *head, const float *cosine, const float *sine, long W) {
    for (long i = 0, j = W / 2; j < W; i++, j++) {
        float low = head[i], high = head[j];
        head[i] = low * cosine[i] - high * sine[i];
        head[j] = high * cosine[j] + low * sine[j];
    }
}

/* y [n][E] = x m + bias. `space` has room for ceil(n/16) * 16 * D numbers. */
void anypo_product(const matrix *m, const float *x, long n, float *y, float *space) {
#pragma omp parallel
    {
        lay_out(x, n, m->inputs, space);
        multiply(m, space, n, y, 0);
    }
}

/* The first half of a layer: mixed [n][E] = queries, keys and values of the normed state [n][D], of which the first `queries` heads and the next `keys`
   heads of W numbers are normed, where there is such a norm, and rotated by cosine and sine [n][W]. `room` [n][D]. */
void anypo_mix(const float *state, norm before, const matrix *mix, norm query, norm key, long queries, long keys, const float *cosine, const float *sine,
               long W, long n, float *mixed, float *room, float *space) {
#pragma omp parallel
    {
        normalize_rows(state, before, n, mix->inputs, room, space);
        multiply(mix, space, n, mixed, 0);
#pragma omp for schedule(static)
        for (long r = 0; r < n; r++)
            for (long h = 0; h < queries + keys; h++) {
                float *head = mixed + r * mix->outputs + h * W;
                norm by = h < queries ? query : key;
                if (by.weight) normalize(head, by, W, head);
                rotate(head, cosine + r * W, sine + r * W, W);
            }
    }
}

/* The second half: state [n][D] += output attended [n][A]; state += down(silu(gate x) * up x) with x the normed state. `room` holds n times the largest
   width, `space` ceil(n/16) * 16 times it. */
void anypo_finish(const float *attended, const matrix *output, norm after, const matrix *gate, const matrix *up, const matrix *down, long n, float *state,
                  float *room, float *space) {
#pragma omp parallel
    {
        lay_out(attended, n, output->inputs, space);
        multiply(output, space, n, state, 1);
        normalize_rows(state, after, n, gate->inputs, room, space);
        gated(gate, up, space, n, room);
        lay_out(room, n, down->inputs, space);
        multiply(down, space, n, state, 1);
    }
}

static inline float total_of(lanes v) {
    v += __builtin_shuffle(v, (places){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (places){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (places){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return v[0] + v[1];
}

/* Scores, weights and sums of one block of up to BLOCK keys for the queries of one row and key head, joined to what is there so far. */
#define BLOCK 64
static void attend_block(const float *query, const float *keys, const float *values, long count, long g, long W, float scale, float *most, float *total,
                         float *sums) {
    for (long q = 0; q < g; q++) {
        float score[BLOCK] __attribute__((aligned(64)));
        const float *own = query + q * W;
        float top = most[q];
        for (long c = 0; c < count; c++) {
            lanes product = {0};
            for (long w = 0; w < W; w += LANES) product += *(const lanes *)(own + w) * *(const lanes *)(keys + c * W + w);
            score[c] = total_of(product) * scale;
            top = score[c] > top ? score[c] : top;
        }
        for (long c = count; c < BLOCK; c++) score[c] = -INFINITY;
        float shrink = most[q] == top ? 1 : expf(most[q] - top);
        lanes sum = {0};
        for (long c = 0; c < BLOCK; c += LANES) {
            lanes value = *(lanes *)(score + c) - top;
            value = choose(value > -87.0f, exponential(value), (lanes){0});
            *(lanes *)(score + c) = value;
            sum += value;
        }
        total[q] = total[q] * shrink + total_of(sum);
        most[q] = top;
        for (long w = 0; w < W; w += LANES) {
            lanes seen = *(lanes *)(sums + q * W + w) * shrink;
            for (long c = 0; c < count; c++) seen += score[c] * *(const lanes *)(values + c * W + w);
            *(lanes *)(sums + q * W + w) = seen;
        }
    }
}

/* Keys and values of rows or of prompts, [rows][K][capacity][W], of which `columns` are filled, in each row from its own `first` on. */
typedef struct { float *keys, *values; const long *first; long capacity, columns; } store_of_keys;

static void attend_all(const float *query, const store_of_keys *in, long row, long head, long K, long g, long W, float scale, float *most, float *total,
                       float *sums) {
    long base = (row * K + head) * in->capacity;
    for (long c = in->first ? in->first[row] : 0; c < in->columns; c += BLOCK) {
        long count = in->columns - c < BLOCK ? in->columns - c : BLOCK;
        attend_block(query, in->keys + (base + c) * W, in->values + (base + c) * W, count, g, W, scale, most, total, sums);
    }
}

/* Attention of one token a row. mixed [n][(K g + 2 K) W] holds queries, keys and values; keys and values are put into the last column of `own`; out
   [n][K][g][W] is what the queries see there and in the prompt owner[row] of `shared`, which may be null. W is a multiple of 16. */
void anypo_attend(const float *mixed, store_of_keys *own, const store_of_keys *shared, const long *owner, long n, long K, long g, long W, float scale,
                  float *out) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n * K; i++) {
        long head = i / n, row = i % n; /* rows of one prompt one after another: its keys stay in the cache */
        const float *line = mixed + row * (K * g + 2 * K) * W, *query = line + head * g * W;
        long last = ((row * K + head) * own->capacity + own->columns - 1) * W;
        for (long w = 0; w < W; w++) {
            own->keys[last + w] = line[(K * g + head) * W + w];
            own->values[last + w] = line[(K * g + K + head) * W + w];
        }
        float most[g], total[g], *sums = out + (row * K + head) * g * W;
        for (long q = 0; q < g; q++) most[q] = -INFINITY, total[q] = 0;
        for (long j = 0; j < g * W; j++) sums[j] = 0;
        if (shared) attend_all(query, shared, owner[row], head, K, g, W, scale, most, total, sums);
        attend_all(query, own, row, head, K, g, W, scale, most, total, sums);
        for (long q = 0; q < g; q++)
            for (long w = 0; w < W; w++) sums[q * W + w] /= total[q];
    }
}

/* inner = silu(opened) * raised. */
void anypo_gate(const float *opened, const float *raised, float *inner, long count) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < tiles(count); i++) {
        long some = tile(count, i);
        lanes o = fetch(opened + i * LANES, some);
        store(o / (1 + exponential(-o)) * fetch(raised + i * LANES, some), inner + i * LANES, some);
    }
}

/* The same once more, and the gradients in `opened` and `raised` from `slope`, the one in `inner`, which is overwritten by the latter. */
void anypo_gate_backward(const float *opened, const float *raised, float *slope, float *inner, float *by_opened, long count) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < tiles(count); i++) {
        long at = i * LANES, some = tile(count, i);
        lanes o = fetch(opened + at, some), r = fetch(raised + at, some), s = fetch(slope + at, some);
        lanes open = 1 / (1 + exponential(-o)), active = o * open;
        store(active * r, inner + at, some);
        store(s * r * (open + active * (1 - open)), by_opened + at, some);
        store(s * active, slope + at, some);
    }
}

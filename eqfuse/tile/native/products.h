// Matrix products: a library of their own, which all kernels call. The large ones are made by sgemm_ and dgemm_ of torch's BLAS,
// which are given when this is loaded. Distances in elements: of rows, of the folded axis, of columns. For few rows, and where no
// distance of a matrix is 1, or there is no BLAS, blocks of vectors do.

typedef void (*Gemm)(const char*, const char*, const int*, const int*, const int*, const void*, const void*,
                     const int*, const void*, const int*, const void*, void*, const int*);
static Gemm gemm_f32 = 0, gemm_f64 = 0, gemm_bf16 = 0;
static int (*library_threads)(int) = 0;
extern "C" void use_library(void* single, void* twice, void* half, void* threads) {
  gemm_f32 = (Gemm)single; gemm_f64 = (Gemm)twice; gemm_bf16 = (Gemm)half;
  library_threads = (int (*)(int))threads;
}

// How many threads our own products of this thread are shared out among; and those of the BLAS, which are asked for with it.
static thread_local int sharing = 1;
extern "C" void exchange_threads(int* counts) {
  int before = sharing;
  sharing = counts[0]; counts[0] = before;
  if (library_threads) counts[1] = library_threads(counts[1]);
}

INLINE float fused(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
INLINE double fused(double x, double y, double z) { return __builtin_fma(x, y, z); }
INLINE float wide(float x) { return x; }
INLINE double wide(double x) { return x; }
INLINE float wide(u16 x) { unsigned b = (unsigned)x << 16; float y; __builtin_memcpy(&y, &b, 4); return y; }
INLINE bool is_finite(float x) { return __builtin_fabsf(x) < INFINITY; }
INLINE bool is_finite(double x) { return __builtin_fabs(x) < __builtin_inf(); }

// out[m, n] (+)= sum of left[m, k] * right[k, n]; `keep` is whether something is there to add to.
#define LOOPS(given, type)                                                                                      \
  static void loops(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om,   \
                    i64 on, i64 M, i64 K, i64 N, bool keep) {                                                   \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) {                                                   \
      type sum = keep ? out[m * om + n * on] : 0;                                                               \
      for (i64 k = 0; k < K; k++) sum = fused(wide(left[m * lm + k * lk]), wide(right[k * rk + n * rn]), sum);  \
      out[m * om + n * on] = sum;                                                                               \
    }                                                                                                           \
  }
LOOPS(float, float)
LOOPS(double, double)
LOOPS(u16, float)

// A few rows times a matrix, which is read once, where it lies, at the rate of memory; a library packs it first. It is
// read in several places at once, and asked for `AHEAD` elements before: a processor looks ahead to the end of a page.
#define FEW 8
#define SEVERAL 16  // where the matrix is more than a cache holds
#define ROWS 4
#define STREAMS 4
#define AHEAD 1024
#define UNROLL _Pragma("GCC unroll 16")
INLINE F part(const float* p) { return load_f32(p); }
INLINE F part(const float* p, i64 n) { return load_f32(p, n); }
INLINE F part(const u16* p) { return load_bf16(p); }
INLINE F part(const u16* p, i64 n) { return load_bf16(p, n); }

// Lane r is the sum of the lanes of s[r].
INLINE F sums_of(F* s) {
#if defined(__clang__)
  F r; EACH r[lane] = fold_sum(s[lane]); return r;
#else
  UNROLL for (int h = LANES / 2; h; h /= 2) UNROLL for (int k = 0; k < h; k++) {
    I high = (lanes() & h) != 0, own = lanes() + (high & LANES);
    s[k] = __builtin_shuffle(s[k], s[k + h], own) + __builtin_shuffle(s[k], s[k + h], own ^ h);
  }
  return s[0];
#endif
}

// The folded axis is contiguous in both: R rows by LANES / R columns, the lanes added up at the end. The columns are
// read from `STREAMS` places that are `far` columns apart.
template <int R, class T>
INLINE void block_of_dots(const T* left, i64 lm, const T* right, i64 rn, float* out, i64 om, i64 M, i64 K, i64 N,
                          i64 far, bool keep) {
  const int C = LANES / R, NEAR = C > STREAMS ? C / STREAMS : 1;
  const T *x[R], *y[C];
  F s[LANES] = {};
  UNROLL for (int r = 0; r < R; r++) x[r] = left + least(r, M - 1) * lm;
  UNROLL for (int c = 0; c < C; c++) y[c] = right + (far ? c / NEAR * far + c % NEAR : least(c, N - 1)) * rn;
  i64 k = 0;
  for (; k + LANES <= K; k += LANES) {
    F from[C];
    UNROLL for (int c = 0; c < C; c++) { __builtin_prefetch(y[c] + k + AHEAD); from[c] = part(y[c] + k); }
    UNROLL for (int r = 0; r < R; r++) {
      F at = part(x[r] + k);
      UNROLL for (int c = 0; c < C; c++) s[r * C + c] = fma(at, from[c], s[r * C + c]);
    }
  }
  if (k < K) UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
    s[r * C + c] = fma(part(x[r] + k, K - k), part(y[c] + k, K - k), s[r * C + c]);
  F sums = sums_of(s);
  for (int r = 0; r < least(R, M); r++) for (int c = 0; c < least(C, N); c++) {
    float* p = out + r * om + (far ? c / NEAR * far + c % NEAR : c);
    *p = (keep ? *p : 0) + sums[r * C + c];
  }
}
template <int R, class T>
static void rows_of_dots(const T* left, i64 lm, const T* right, i64 rn, float* out, i64 om, i64 M, i64 K, i64 N, bool keep) {
  const int C = LANES / R, NEAR = C > STREAMS ? C / STREAMS : 1;
  i64 far = N / C * NEAR, n = C < STREAMS ? 0 : far / NEAR * C;
  if (n) for (i64 k = 0; k < far; k += NEAR)
    block_of_dots<R>(left, lm, right + k * rn, rn, out + k, om, M, K, C, far, keep);
  for (; n < N; n += C) block_of_dots<R>(left, lm, right + n * rn, rn, out + n, om, M, K, N - n, 0, keep);
}

// The matrix's columns are contiguous: R rows by C vectors of columns, `some` lanes of the last one; K rows of the
// matrix from each of several places that are `far` rows apart.
template <int R, int C, class T>
INLINE void block_of_sums(const T* left, i64 lm, i64 lk, const T* right, i64 rk, float* out, i64 om, i64 M, i64 K,
                          i64 places, i64 far, i64 some, bool keep) {
  F s[R][C] = {};
  for (i64 place = 0; place < places; place++) for (i64 near = 0; near < K; near++) {
    i64 k = place * far + near;
    F y[C];
    UNROLL for (int c = 0; c < C; c++) {
      const T* p = right + k * rk + c * LANES;
      __builtin_prefetch(p + AHEAD);
      y[c] = C > 1 ? part(p) : part(p, some);
    }
    UNROLL for (int r = 0; r < R; r++) {
      F x = splat(wide(left[least(r, M - 1) * lm + k * lk]));
      UNROLL for (int c = 0; c < C; c++) s[r][c] = fma(x, y[c], s[r][c]);
    }
  }
  // Sums of sums: what rounds off is as for the root of so many terms.
  if (keep) UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) if (r < M)
    s[r][c] += C > 1 ? load_f32(out + r * om + c * LANES) : load_f32(out + r * om, some);
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) if (r < M) {
    if (C > 1) put_f32(out + r * om + c * LANES, s[r][c]); else put_f32(out + r * om, s[r][c], some);
  }
}
template <int R, class T>
static void rows_of_sums(const T* left, i64 lm, i64 lk, const T* right, i64 rk, float* out, i64 om, i64 M, i64 K,
                         i64 N, i64 places, i64 far, bool keep) {
  i64 n = 0;
  for (; n + 4 * LANES <= N; n += 4 * LANES)
    block_of_sums<R, 4>(left, lm, lk, right + n, rk, out + n, om, M, K, places, far, LANES, keep);
  for (; n < N; n += LANES)
    block_of_sums<R, 1>(left, lm, lk, right + n, rk, out + n, om, M, K, places, far, least(LANES, N - n), keep);
}
template <class T>
static void some_sums(const T* left, i64 lm, i64 lk, const T* right, i64 rk, float* out, i64 om, i64 M, i64 K, i64 N,
                      i64 places, i64 far, bool keep) {
  for (i64 m = 0; m < M; m += ROWS) {
    if (M - m == 1) rows_of_sums<1>(left + m * lm, lm, lk, right, rk, out + m * om, om, 1, K, N, places, far, keep);
    else rows_of_sums<ROWS>(left + m * lm, lm, lk, right, rk, out + m * om, om, least(ROWS, M - m), K, N, places, far, keep);
  }
}
template <class T>
static void narrow(const T* left, i64 lm, i64 lk, const T* right, i64 rk, i64 rn, float* out, i64 om, i64 M, i64 K,
                   i64 N, bool keep) {
  if (rk == 1) {
    i64 columns = M > ROWS ? 4 * LANES : N;  // few enough that they are still there for the next rows
    for (i64 n = 0; n < N; n += columns) for (i64 m = 0; m < M; m += ROWS) {
      const T *x = left + m * lm, *y = right + n * rn;
      float* p = out + m * om + n;
      if (M - m == 1) rows_of_dots<1>(x, lm, y, rn, p, om, 1, K, least(columns, N - n), keep);
      else rows_of_dots<ROWS>(x, lm, y, rn, p, om, least(ROWS, M - m), K, least(columns, N - n), keep);
    }
    return;
  }
  const i64 few = 4, far = K / STREAMS / few * few;
  for (i64 k = 0; k < far; k += few)
    some_sums(left + k * lk, lm, lk, right + k * rk, rk, out, om, M, few, N, STREAMS, far, keep || k);
  for (i64 k = STREAMS * far; k < K; k += few)
    some_sums(left + k * lk, lm, lk, right + k * rk, rk, out, om, M, least(few, K - k), N, 1, 0, keep || k);
}
INLINE bool is_narrow(float, i64 M, i64 K, i64 N, i64 lk, i64 rk, i64 rn) {
  return M <= (K * N * (i64)sizeof(float) > CACHE / 2 ? SEVERAL : FEW) && (rk == 1 ? lk == 1 && (M <= FEW || K >= 16 * LANES) : rn == 1);
}
INLINE bool is_narrow(double, i64, i64, i64, i64, i64, i64) { return false; }
INLINE void narrow(const double*, i64, i64, const double*, i64, i64, double*, i64, i64, i64, i64, bool) {}


// Blocks of rows times a panel of columns, which is packed for the first-level cache: as fast as a library where that is
// short of rows, of columns or of depth, and memory is asked for the next panel meanwhile. Any distances will do.
#define LOW 256  // rows: a library packs the columns for more of them
#define DEEP 128
#define BROAD 3
#define TALL (LANES == 16 ? 8 : 4)
// K rows of a panel of `some` columns, zeros behind them, as rows of C vectors.
static void packed(const float* right, i64 rk, i64 rn, float* to, i64 K, i64 C, i64 some) {
  for (i64 c = 0; c < C; c++) {
    const float* p = right + c * LANES * rn;
    i64 n = least(some - c * LANES, LANES), k = 0;
    float* q = to + c * LANES;
    if (rn == 1 && n == LANES) for (; k < K; k++) put_f32(q + k * C * LANES, load_f32(p + k * rk));
    else if (rn == 1) for (; k < K; k++) put_f32(q + k * C * LANES, load_f32(p + k * rk, n));
#if !defined(__clang__)
    else if (rk == 1) for (; k + LANES <= K; k += LANES) {  // transposed: neighbours change halves, then quarters
      F v[LANES];
      for (int j = 0; j < LANES; j++) v[j] = j < n ? load_f32(p + j * rn + k) : F{};
      UNROLL for (int h = LANES / 2; h; h /= 2) UNROLL for (int j = 0; j < LANES; j++) if (!(j & h)) {
        I high = (lanes() & h) != 0, at = lanes();
        F x = v[j], y = v[j + h];
        v[j] = __builtin_shuffle(x, y, high ? (at ^ h) | LANES : at);
        v[j + h] = __builtin_shuffle(x, y, high ? at | LANES : at | h);
      }
      for (int j = 0; j < LANES; j++) put_f32(q + (k + j) * C * LANES, v[j]);
    }
#endif
    for (; k < K; k++) for (int j = 0; j < LANES; j++) q[k * C * LANES + j] = j < n ? p[k * rk + j * rn] : 0;
  }
}
// What a block of rows asks memory for while it is made: for every LANES of depth so many lines of the next panel, `far` apart,
// at a place that is `step` further for each of the depth.
struct Ahead { const float* next; i64 lines, far, step; };
// How far a row's elements are from its first one.
struct Even { i64 step; i64 operator[](i64 k) const { return k * step; } };
template <int R, int C, class At>
INLINE void block_of_panel(const float* x, i64 lm, At at, const float* y, float* out, i64 om, i64 M, i64 K, i64 some,
                           bool keep, Ahead ahead) {
  F s[R][C] = {};
  const float* row[R];
  UNROLL for (int r = 0; r < R; r++) row[r] = x + least(r, M - 1) * lm;
  for (i64 from = 0; from < K; from += LANES) {
    const float* p = ahead.next + from * ahead.step;
    for (i64 line = 0; line < ahead.lines; line++, p += ahead.far) __builtin_prefetch(p, 0, 2);
    for (i64 k = from; k < least(from + LANES, K); k++, y += C * LANES) {
      F v[C];
      UNROLL for (int c = 0; c < C; c++) v[c] = load_f32(y + c * LANES);
      const i64 place = at[k];
      UNROLL for (int r = 0; r < R; r++) {
        F a = splat(row[r][place]);
        UNROLL for (int c = 0; c < C; c++) s[r][c] = fma(a, v[c], s[r][c]);
      }
    }
  }
  if (M == R && some == C * LANES) {
    if (keep) UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) s[r][c] += load_f32(out + r * om + c * LANES);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) put_f32(out + r * om + c * LANES, s[r][c]);
    return;
  }
  float made[R * C * LANES];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) put_f32(made + (r * C + c) * LANES, s[r][c]);
  for (i64 r = 0; r < M; r++) for (i64 c = 0; c < some; c += LANES) {
    float* p = out + r * om + c;
    i64 n = least(LANES, some - c);
    F sum = load_f32(made + r * C * LANES + c);
    put_f32(p, keep ? sum + load_f32(p, n) : sum, n);
  }
}
template <int C>
static void panel(const float* left, i64 lm, i64 lk, const float* right, i64 rk, i64 rn, float* out, i64 om, i64 M, i64 K,
                  i64 some, bool keep, const float* next) {
  float y[DEEP * C * LANES] __attribute__((aligned(64)));
  packed(right, rk, rn, y, K, C, some);
  const i64 each = (C * LANES * TALL + M - 1) / M;  // columns of the next panel that a block asks for, where depth is contiguous
  Ahead ahead = {next, rk == 1 ? each : LANES, rk == 1 ? rn : rk, rk == 1 ? 1 : rk};
  i64 m = 0;
  for (i64 block = 0; m < M; m += TALL, block++) {
    if (!next || (rk != 1 && block == C)) ahead.lines = 0;
    block_of_panel<TALL, C>(left + m * lm, lm, Even{lk}, y, out + m * om, om, least(TALL, M - m), K, some, keep, ahead);
    ahead.next += rk == 1 ? each * rn : LANES;
  }
}
static void panels(const float* left, i64 lm, i64 lk, const float* right, i64 rk, i64 rn, float* out, i64 om, i64 M,
                   i64 K, i64 N, bool keep) {
  const bool cold = K * N * (i64)sizeof(float) > CACHE / 4;
  for (i64 k = 0; k < K; k += DEEP) for (i64 n = 0, some; n < N; n += some) {
    i64 depth = least(DEEP, K - k), vectors = (N - n + LANES - 1) / LANES;
    int wide = vectors == 4 ? 2 : least(vectors, BROAD);
    some = least(wide * LANES, N - n);
    const float *x = left + k * lk, *y = right + k * rk + n * rn;
    const float* next = !cold ? 0 : n + some < N ? y + some * rn : k + DEEP < K ? right + (k + DEEP) * rk : 0;
    auto of = wide == 3 ? panel<3> : wide == 2 ? panel<2> : panel<1>;
    of(x, lm, lk, y, rk, rn, out + n, om, M, depth, some, keep || k, next);
  }
}
// Where a library packs columns whose depth is contiguous it takes longer, and it does not ask for memory.
INLINE bool are_panels(float, i64 M, i64 K, i64 N, i64 rk) {
  return M <= LOW && N >= LANES / 2 && K > 0 && (rk == 1 || K * N * (i64)sizeof(float) > CACHE / 4);
}
INLINE bool are_panels(double, i64, i64, i64, i64) { return false; }
INLINE void panels(const double*, i64, i64, const double*, i64, i64, double*, i64, i64, i64, i64, bool) {}
INLINE void panels(const u16*, i64, i64, const u16*, i64, i64, float*, i64, i64, i64, i64, bool) {}

// Products of which several axes are folded, or are rows, or columns. Each has distances in the left matrix, in the right one
// and in the sums, in elements.
struct Axis { i64 length, left, right, out; Axis turned() const { return {length, right, left, out}; } };
#define MOST 20  // axes of a product, and one for a group that has none

// Neighbours of which one follows the other in all matrices are one axis; no axis has only one position.
static int joined(const Axis* given, int count, Axis* to) {
  int n = 0;
  for (int k = 0; k < count; k++) {
    const Axis& a = given[k];
    if (a.length == 1) continue;
    if (n && to[n - 1].left == a.left * a.length && to[n - 1].right == a.right * a.length && to[n - 1].out == a.out * a.length)
      to[n - 1] = {to[n - 1].length * a.length, a.left, a.right, a.out};
    else to[n++] = a;
  }
  if (!n) to[n++] = {1, 0, 0, 0};
  return n;
}

// Depth of any places: they are listed, of both matrices. The columns are `broad` rows, `far` apart, of `near` columns, `step`
// apart, of which one follows the other in the sums: a vector may be made of the end of a row and of the beginning of the next.
#define LONG 96
template <int C>
static void panel_of_places(const float* left, i64 lm, const i64* left_at, const float* right, const i64* right_at, i64 from,
                            i64 far, i64 near, i64 step, float* out, i64 om, i64 M, i64 K, i64 some, bool keep) {
  float y[LONG * C * LANES] __attribute__((aligned(64)));
  for (i64 at = 0, n, row = from / near, column = from % near; at < some; at += n, column += n) {
    if (column == near) row++, column = 0;
    n = least(least(near - column, some - at), LANES - at % LANES);
    const float* p = right + row * far + column * step;
    float* q = y + at;
    if (step != 1) for (i64 k = 0; k < K; k++) put_f32(q + k * C * LANES, gather_f32(p + right_at[k], step, n), n);
    else if (n == LANES) for (i64 k = 0; k < K; k++) put_f32(q + k * C * LANES, load_f32(p + right_at[k]));
    else for (i64 k = 0; k < K; k++) put_f32(q + k * C * LANES, load_f32(p + right_at[k], n), n);
  }
  if (some < C * LANES) for (i64 k = 0; k < K; k++) put_f32(y + k * C * LANES + some, F{}, C * LANES - some);
  for (i64 m = 0; m < M; m += TALL)
    block_of_panel<TALL, C>(left + m * lm, lm, left_at, y, out + m * om, om, least(TALL, M - m), K, some, keep, Ahead{0, 0, 0, 0});
}
static void places(const float* left, i64 lm, const float* right, float* out, i64 om, i64 M, const Axis* depths, int count,
                   i64 K, i64 broad, i64 far, i64 near, i64 step, bool keep) {
  const i64 chunks = (K + LONG - 1) / LONG, deep = (K + chunks - 1) / chunks, N = broad * near;
  i64 left_at[LONG], right_at[LONG];
  for (i64 k = 0; k < K; k += deep) {
    const i64 depth = least(deep, K - k);
    for (i64 d = 0; d < depth; d++) {
      i64 rest = k + d, l = 0, r = 0;
      for (int a = count - 1; a >= 0; a--) {
        const i64 at = rest % depths[a].length;
        rest /= depths[a].length; l += at * depths[a].left; r += at * depths[a].right;
      }
      left_at[d] = l; right_at[d] = r;
    }
    for (i64 n = 0, some; n < N; n += some) {
      const i64 vectors = (N - n + LANES - 1) / LANES;
      const int wide = vectors == 4 ? 2 : least(vectors, BROAD);
      some = least(wide * LANES, N - n);
      auto of = wide == 3 ? panel_of_places<3> : wide == 2 ? panel_of_places<2> : panel_of_places<1>;
      of(left, lm, left_at, right, right_at, n, far, near, step, out + n, om, M, depth, some, keep || k);
    }
  }
}

#define WORTH (1 << 18)  // products of numbers: fewer take no longer than to wake a thread
// Parts of rows or of columns, whichever are more, one for each thread; 1 where they are too few.
struct Parts {
  bool rows;
  i64 each, count;
  Parts(i64 M, i64 K, i64 N) : rows(M > N || N < 2 * LANES) {
    i64 whole = rows ? M : N, least_ = rows ? TALL : 2 * LANES, threads = sharing;
    if (threads > M * N * K / WORTH) threads = M * N * K / WORTH;
    each = threads < 2 ? whole : ((whole + threads - 1) / threads + least_ - 1) / least_ * least_;
    count = each ? (whole + each - 1) / each : 1;
  }
};

#define PRODUCT(given, type, dtype) \
  static void product(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om, \
                      i64 on, i64 M, i64 K, i64 N, bool keep);                                                  \
  static void shared(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om,  \
                     i64 M, i64 K, i64 N, bool keep, Parts parts) {                                             \
    const int before = sharing;                                                                                 \
    _Pragma("omp parallel num_threads(parts.count)") {                                                          \
      sharing = 1;                                                                                              \
      _Pragma("omp for schedule(static, 1)") for (i64 part = 0; part < parts.count; part++) {                   \
        i64 at = part * parts.each, some = least(parts.each, (parts.rows ? M : N) - at);                        \
        if (parts.rows) product(left + at * lm, lm, lk, right, rk, rn, out + at * om, om, 1, some, K, N, keep); \
        else product(left, lm, lk, right + at * rn, rk, rn, out + at, om, 1, M, K, some, keep);                 \
      }                                                                                                         \
    }                                                                                                           \
    sharing = before;                                                                                           \
  }                                                                                                             \
  static void product(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om, \
                      i64 on, i64 M, i64 K, i64 N, bool keep) {                                                 \
    if (M <= 0 || N <= 0) return;                                                                               \
    if (on != 1 && N > 1) {                                                                                     \
      if (om != 1 && M > 1) return loops(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);              \
      return product(right, rn, rk, left, lk, lm, out, on, 1, N, K, M, keep);                                   \
    }                                                                                                           \
    if (M == 1 || N == 1 || K == 1) {  /* then a distance does not matter */                                    \
      if (M == 1) { om = N; lm = lk == 1 ? K : 1; }                                                             \
      if (N == 1) { rn = rk == 1 ? K : 1; if (om < 1) om = 1; }                                                 \
      if (K == 1) { lk = lm == 1 ? M : 1; rk = rn == 1 ? N : 1; }                                               \
    }                                                                                                           \
    const bool turned = N == 1 && N < M && om == 1 && is_narrow((type)0, N, K, M, rk, lk, lm) && K > 0;         \
    const bool few = is_narrow((type)0, M, K, N, lk, rk, rn) && K > 0;                                          \
    const bool small = sizeof(given) == 4 && are_panels((type)0, M, K, N, rk);                                  \
    bool left_plain = lk == 1, right_plain = rn == 1;                                                           \
    bool fits = (left_plain || lm == 1) && (right_plain || rk == 1) && lm >= 0 && rn >= 0;                      \
    i64 ld_left = left_plain ? lm : lk, ld_right = right_plain ? rk : rn;                                       \
    fits = fits && ld_left >= (left_plain ? K : M) && ld_right >= (right_plain ? N : K) && om >= N;             \
    fits = fits && ld_left < (1LL << 31) && ld_right < (1LL << 31) && om < (1LL << 31) && K > 0;                \
    const bool ours = turned || few || small || !fits || !gemm_##dtype;                                         \
    if (ours && sharing > 1) {                                                                                  \
      Parts parts(M, K, N);                                                                                     \
      if (parts.count > 1)                                                                                      \
        return shared(left, lm, lk, right, rk, rn, out, om, M, K, N, keep, parts);                              \
    }                                                                                                           \
    if (turned) return narrow(right, rn, rk, left, lk, lm, out, 1, N, K, M, keep);                              \
    if (few) return narrow(left, lm, lk, right, rk, rn, out, om, M, K, N, keep);                                \
    if (small) return panels(left, lm, lk, right, rk, rn, out, om, M, K, N, keep);                              \
    if (ours) return slowly_##dtype(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);                   \
    int m = M, k = K, n = N, a = ld_left, b = ld_right, c = om;                                                 \
    type one = 1, beta = keep;                                                                                  \
    gemm_##dtype(right_plain ? "N" : "T", left_plain ? "N" : "T", &n, &m, &k, &one, right, &b, left, &a, &beta, \
                 out, &c);                                                                                      \
  }                                                                                                             \
  static bool all_finite(const given* x, i64 xm, i64 xn, i64 M, i64 N) {                                        \
    bool finite = true;                                                                                         \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) finite &= is_finite(wide(x[m * xm + n * xn]));      \
    return finite;                                                                                              \
  }                                                                                                             \
  /* Where a mask (of distances like its operand's) is false the other operand is read as 0. */                 \
  static void product(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om, \
                      i64 on, i64 M, i64 K, i64 N, bool keep, const u8* left_mask, i64 lmm, i64 lmk,            \
                      const u8* right_mask, i64 rmk, i64 rmn) {                                                 \
    if ((!left_mask || all_finite(right, rk, rn, K, N)) && (!right_mask || all_finite(left, lm, lk, M, K)))     \
      return product(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);                                  \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) {                                                   \
      type sum = keep ? out[m * om + n * on] : 0;                                                               \
      for (i64 k = 0; k < K; k++) {                                                                             \
        type x = wide(left[m * lm + k * lk]), y = wide(right[k * rk + n * rn]);                                 \
        if (right_mask && !right_mask[k * rmk + n * rmn]) x = 0;                                                \
        if (left_mask && !left_mask[m * lmm + k * lmk]) y = 0;                                                  \
        sum = fused(x, y, sum);                                                                                 \
      }                                                                                                         \
      out[m * om + n * on] = sum;                                                                               \
    }                                                                                                           \
  }

static void slowly_f32(const float* left, i64 lm, i64 lk, const float* right, i64 rk, i64 rn, float* out, i64 om, i64 on,
                       i64 M, i64 K, i64 N, bool keep) {
  if (K > 0) panels(left, lm, lk, right, rk, rn, out, om, M, K, N, keep);
  else loops(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);
}
PRODUCT(float, float, f32)
#define slowly_f64 loops
PRODUCT(double, double, f64)

// Operands in bfloat16 (which holds every float8 too): their products are exact in float32. Where there is no library
// for them, they are made float32.
static void slowly_bf16(const u16* left, i64 lm, i64 lk, const u16* right, i64 rk, i64 rn, float* out, i64 om, i64 on,
                        i64 M, i64 K, i64 N, bool keep) {
  float* x = (float*)__builtin_malloc((M + N) * K * sizeof(float) + 1);
  float* y = x + M * K;
  for (i64 m = 0; m < M; m++) for (i64 k = 0; k < K; k++) x[m * K + k] = wide(left[m * lm + k * lk]);
  for (i64 k = 0; k < K; k++) for (i64 n = 0; n < N; n++) y[k * N + n] = wide(right[k * rk + n * rn]);
  product(x, K, 1, y, N, 1, out, om, on, M, K, N, keep);
  __builtin_free(x);
}
PRODUCT(u16, float, bf16)

INLINE bool are_places(float) { return true; }
INLINE bool are_places(double) { return false; }
INLINE void places(const double*, i64, const double*, double*, i64, i64, const Axis*, int, i64, i64, i64, i64, i64, bool) {}
INLINE void places(const u16*, i64, const u16*, float*, i64, i64, const Axis*, int, i64, i64, i64, i64, i64, bool) {}

// `rows`, `depths` and `columns` axes, in this order; joined already.
template <class given, class type>
static void several(const given* left, const given* right, type* out, const Axis* axes, int rows, int depths, int columns, bool keep) {
  const Axis *depth = axes + rows, *column = depth + depths;
  const Axis around = rows > 1 ? axes[0] : columns > 2 ? column[0] : Axis{1, 0, 0, 0};
  if (rows > 1 || columns > 2) {
    Axis rest[MOST];
    int n = 0;
    for (int k = 0; k < rows + depths + columns; k++) if (k != (rows > 1 ? 0 : rows + depths)) rest[n++] = axes[k];
    for (i64 k = 0; k < around.length; k++)
      several(left + k * around.left, right + k * around.right, out + k * around.out, rest, rows - (rows > 1), depths,
              columns - (rows == 1), keep);
    return;
  }
  const Axis row = axes[0], last = column[columns - 1];
  i64 K = 1;
  for (int k = 0; k < depths; k++) K *= depth[k].length;
  const Axis outer = columns > 1 ? column[0] : Axis{1, 0, 0, 0};
  const bool follows = outer.length == 1 || outer.out == last.length;
  if (K && row.length && last.length && sizeof(given) == 4 && are_places((type)0) && (depths > 1 || outer.length > 1) &&
      row.length >= TALL && last.out == 1 && (follows ? outer.length : 1) * last.length >= LANES) {
    const i64 parts = least(sharing, row.length * K * last.length * outer.length / WORTH), each =
        parts < 2 ? row.length : ((row.length + parts - 1) / parts + TALL - 1) / TALL * TALL;
    const i64 count = (row.length + each - 1) / each, together = follows ? outer.length : 1;
    _Pragma("omp parallel for schedule(static, 1) num_threads(count) if (count > 1)")
    for (i64 part = 0; part < count; part++) for (i64 n = 0; n < outer.length; n += together) {
      const i64 m = part * each;
      places(left + m * row.left, row.left, right + n * outer.right, out + m * row.out + n * outer.out, row.out,
             least(each, row.length - m), depth, depths, K, together, outer.right, last.length, last.right, keep);
    }
    return;
  }
  const Axis inner = depth[depths - 1];
  const i64 before = K && inner.length ? K / inner.length : 1;
  for (i64 n = 0; n < outer.length; n++) for (i64 k = 0; k < before; k++) {
    i64 rest = k, l = 0, r = n * outer.right;
    for (int a = depths - 2; a >= 0; a--) {
      if (!K) break;
      const i64 at = rest % depth[a].length;
      rest /= depth[a].length; l += at * depth[a].left; r += at * depth[a].right;
    }
    product(left + l, row.left, inner.left, right + r, inner.right, last.right, out + n * outer.out, row.out, last.out,
            row.length, K ? inner.length : 0, last.length, keep || k);
  }
}

#define OFFERED(given, type, dtype)                                                                             \
  extern "C" void product_##dtype(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn,        \
                                  type* out, i64 om, i64 on, i64 M, i64 K, i64 N, bool keep) {                  \
    product(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);                                           \
  }                                                                                                             \
  extern "C" void masked_##dtype(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn,         \
                                 type* out, i64 om, i64 on, i64 M, i64 K, i64 N, bool keep, const u8* left_mask,\
                                 i64 lmm, i64 lmk, const u8* right_mask, i64 rmk, i64 rmn) {                    \
    product(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep, left_mask, lmm, lmk, right_mask, rmk, rmn);\
  }                                                                                                             \
  extern "C" void several_##dtype(const given* left, const given* right, type* out, const i64* axes, i64 rows,  \
                                  i64 depths, i64 columns, bool keep) {                                         \
    const Axis* all = (const Axis*)axes;                                                                        \
    Axis turned[MOST], found[MOST];                                                                             \
    if (rows && (!columns || all[rows + depths + columns - 1].out != 1) && all[rows - 1].out == 1) {            \
      for (int k = 0; k < columns; k++) turned[k] = all[rows + depths + k].turned();                            \
      for (int k = 0; k < depths; k++) turned[columns + k] = all[rows + k].turned();                            \
      for (int k = 0; k < rows; k++) turned[columns + depths + k] = all[k].turned();                            \
      all = turned;                                                                                             \
      const given* other = left; left = right; right = other;                                                   \
      const i64 count = rows; rows = columns; columns = count;                                                  \
    }                                                                                                           \
    int m = joined(all, rows, found), k = joined(all + rows, depths, found + m);                                \
    int n = joined(all + rows + depths, columns, found + m + k);                                                \
    several(left, right, out, found, m, k, n, keep);                                                            \
  }
OFFERED(float, float, f32)
OFFERED(double, double, f64)
OFFERED(u16, float, bf16)

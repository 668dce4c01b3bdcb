// Matrix products by the library that torch has: sgemm_ and dgemm_ of its BLAS, which are given when this is loaded.
// `step` arguments are distances in elements: of rows, of the folded axis, of columns. Where no distance of a matrix
// is 1, or there is no library, loops over vectors do.

typedef void (*Gemm)(const char*, const char*, const int*, const int*, const int*, const void*, const void*,
                     const int*, const void*, const int*, const void*, void*, const int*);
static Gemm gemm_f32 = 0, gemm_f64 = 0;
extern "C" void use_products(void* single, void* twice) { gemm_f32 = (Gemm)single; gemm_f64 = (Gemm)twice; }

INLINE float fused(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
INLINE double fused(double x, double y, double z) { return __builtin_fma(x, y, z); }
INLINE bool is_finite(float x) { return __builtin_fabsf(x) < INFINITY; }
INLINE bool is_finite(double x) { return __builtin_fabs(x) < __builtin_inf(); }

// out[m, n] (+)= sum of left[m, k] * right[k, n]; `keep` is whether something is there to add to.
#define PRODUCT(type, dtype)                                                                                     \
  static void loops(const type* left, i64 lm, i64 lk, const type* right, i64 rk, i64 rn, type* out, i64 om,      \
                    i64 on, i64 M, i64 K, i64 N, bool keep) {                                                    \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) {                                                    \
      type sum = keep ? out[m * om + n * on] : 0;                                                                \
      for (i64 k = 0; k < K; k++) sum = fused(left[m * lm + k * lk], right[k * rk + n * rn], sum);               \
      out[m * om + n * on] = sum;                                                                                \
    }                                                                                                            \
  }                                                                                                              \
  static void product(const type* left, i64 lm, i64 lk, const type* right, i64 rk, i64 rn, type* out, i64 om,    \
                      i64 on, i64 M, i64 K, i64 N, bool keep) {                                                  \
    if (M <= 0 || N <= 0) return;                                                                                \
    if (on != 1 && N > 1) {                                                                                      \
      if (om != 1 && M > 1) return loops(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);               \
      return product(right, rn, rk, left, lk, lm, out, on, 1, N, K, M, keep);                                    \
    }                                                                                                            \
    if (M == 1 || N == 1 || K == 1) {  /* then a distance does not matter */                                     \
      if (M == 1) { om = N; lm = lk == 1 ? K : 1; }                                                              \
      if (N == 1) { rn = rk == 1 ? K : 1; if (om < 1) om = 1; }                                                  \
      if (K == 1) { lk = lm == 1 ? M : 1; rk = rn == 1 ? N : 1; }                                                \
    }                                                                                                            \
    bool left_plain = lk == 1, right_plain = rn == 1;                                                            \
    bool fits = (left_plain || lm == 1) && (right_plain || rk == 1) && lm >= 0 && rn >= 0;                       \
    i64 ld_left = left_plain ? lm : lk, ld_right = right_plain ? rk : rn;                                        \
    fits = fits && ld_left >= (left_plain ? K : M) && ld_right >= (right_plain ? N : K) && om >= N;              \
    fits = fits && ld_left < (1LL << 31) && ld_right < (1LL << 31) && om < (1LL << 31) && K > 0;                 \
    if (!fits || !gemm_##dtype) return loops(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);           \
    int m = M, k = K, n = N, a = ld_left, b = ld_right, c = om;                                                  \
    type one = 1, beta = keep;                                                                                   \
    gemm_##dtype(right_plain ? "N" : "T", left_plain ? "N" : "T", &n, &m, &k, &one, right, &b, left, &a, &beta,  \
                 out, &c);                                                                                       \
  }                                                                                                              \
  static bool all_finite(const type* x, i64 xm, i64 xn, i64 M, i64 N) {                                          \
    bool finite = true;                                                                                          \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) finite &= is_finite(x[m * xm + n * xn]);             \
    return finite;                                                                                               \
  }                                                                                                              \
  /* Where a mask (of distances like its operand's) is false the other operand is read as 0. */                  \
  static void product(const type* left, i64 lm, i64 lk, const type* right, i64 rk, i64 rn, type* out, i64 om,    \
                      i64 on, i64 M, i64 K, i64 N, bool keep, const u8* left_mask, i64 lmm, i64 lmk,             \
                      const u8* right_mask, i64 rmk, i64 rmn) {                                                  \
    if ((!left_mask || all_finite(right, rk, rn, K, N)) && (!right_mask || all_finite(left, lm, lk, M, K)))      \
      return product(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);                                   \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) {                                                    \
      type sum = keep ? out[m * om + n * on] : 0;                                                                \
      for (i64 k = 0; k < K; k++) {                                                                              \
        type x = left[m * lm + k * lk], y = right[k * rk + n * rn];                                              \
        if (right_mask && !right_mask[k * rmk + n * rmn]) x = 0;                                                 \
        if (left_mask && !left_mask[m * lmm + k * lmk]) y = 0;                                                   \
        sum = fused(x, y, sum);                                                                                  \
      }                                                                                                          \
      out[m * om + n * on] = sum;                                                                                \
    }                                                                                                            \
  }
PRODUCT(float, f32)
PRODUCT(double, f64)
